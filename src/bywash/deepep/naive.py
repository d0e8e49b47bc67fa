"""The layouts of `layout.py`, one pair at a time: slow and obvious, for tests."""


def expert_layout(local_NK: list[list[int]], experts: int, alignment: int) -> dict[str, list[int] | list[list[int]]]:
    """`layout.expert_layout` both ways, as lists: counts, plain, expanded and slots."""
    counts = [sum(row.count(expert) for row in local_NK) for expert in range(experts)]
    plain, expanded, slots = [], [], [[-1] * len(row) for row in local_NK]
    start = 0
    for expert, count in enumerate(counts):
        free = start
        for n, row in enumerate(local_NK):
            if expert in row:
                slots[n][row.index(expert)] = free
                free += 1
        expanded.append(free)
        start += -(-count // alignment) * alignment
        plain.append(start)
    return {"counts": counts, "plain": plain, "expanded": expanded, "slots": slots}
