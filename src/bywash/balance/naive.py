"""The slow, obvious twin of `plan_step`, in plain Python integers. Tests compare the two."""

from collections.abc import Sequence


def plan_step_naive(counts: Sequence[Sequence[int]], home: Sequence[int]) -> tuple[list[int], list[int], int]:
    """Return (rank of each expert, rows of each rank, digest), one expert and one row at a time."""
    ranks = len(counts)
    rows = [0] * ranks
    for source in range(ranks):
        for expert, rank in enumerate(home):
            rows[rank] += counts[source][expert]
    words = [count for per_source in counts for count in per_source] + list(home)
    digest = 0
    for position, word in enumerate(words, start=1):
        mixed = (word + position * 0x9E3779B9) % 2**32
        mixed = (mixed ^ mixed >> 16) * 0x85EBCA6B % 2**32
        mixed = (mixed ^ mixed >> 13) * 0xC2B2AE35 % 2**32
        digest = (digest + (mixed ^ mixed >> 16)) % 2**32
    return list(home), rows, digest
