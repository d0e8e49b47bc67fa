"""What a device has written down about a failed exchange, as the error that Python raises.

The device only knows codes and masks of ranks; this file has the words. `peer_device` calls it.
"""

from enum import IntEnum

from bywash.errors import BywashError, ConfigError, ExchangeError, PlanMismatchError, RankLostError
from bywash.kernels.router import NOT_FINITE
from bywash.memory.rendezvous import Members

PHASES = ("sending rows", "waiting for dispatched rows", "sending outputs", "waiting for outputs")


class Code(IntEnum):
    """As in kernels/common.cuh."""

    NONE = 0
    LATE = 1
    MISMATCH = 2
    TOO_MANY_TOKENS = 3
    BAD_EXPERT = 4
    TOLD = 5
    OVER_CAPACITY = 6
    DAMAGED = 7


_MISTAKES = {
    Code.TOO_MANY_TOKENS: "brought more tokens than the heap has room for",
    Code.BAD_EXPERT: "named no expert",
    Code.OVER_CAPACITY: "had more rows for an expert than its batch has room for",
}


def read_failure(words: list[int], members: Members) -> BywashError | None:
    """The error in a device's `Failure` record, or None.

    Args:
        words: code, mask of ranks at fault, detail, phase, deadline.
        members: the ranks; asked for the state of late ones.
    """
    code, ranks, detail, during = words[0], _ranks(words[1]), words[2], PHASES[words[3]]
    if code == Code.NONE:
        return None
    if code != Code.TOLD:
        return _own(code, ranks, detail, during, members)
    teller, theirs = detail >> 32, detail & 0xFFFFFFFF
    told = f"rank {teller} told rank {members.rank} while {during}"
    named = ", ".join(str(rank) for rank in ranks)
    if theirs == Code.LATE:
        return RankLostError(f"rank {named} did not arrive before the deadline; {told}", ranks)
    if theirs == Code.MISMATCH:
        return PlanMismatchError(f"rank {named} planned this step differently; no row was read; {told}", ranks)
    if theirs == Code.DAMAGED:
        return ExchangeError(f"weights of rank {named} arrived damaged in a slot; {told}", ranks)
    return ConfigError(f"exchange peer: rank {named} {_MISTAKES[Code(theirs)]}; {told}")


def _own(code: int, ranks: list[int], detail: int, during: str, members: Members) -> BywashError:
    if code == Code.LATE:
        error = members.late(ranks, during)
        return error if isinstance(error, BywashError) else RankLostError(str(error), ranks)
    if code == Code.MISMATCH:
        return PlanMismatchError(
            f"rank {ranks[0]} planned this step differently (digest {detail >> 32 & 0xFFFFFFFF:#010x} there, "
            f"{detail & 0xFFFFFFFF:#010x} on rank {members.rank}); no row was read. All ranks must run the same "
            "bywash with the same options",
            ranks,
        )
    if code == Code.TOO_MANY_TOKENS:
        return ConfigError(
            f"exchange peer: rank {members.rank} was given {detail} tokens on the device, more than its input or the "
            "heap has rows"
        )
    if code == Code.OVER_CAPACITY:
        expert, rows = detail >> 32 & 0xFFFFFFFF, detail & 0xFFFFFFFF
        return ConfigError(
            f"exchange peer: rank {members.rank} has {rows} rows for expert {expert}, "
            "more than the capacity of its batch; none was dropped and no output was sent. Give `batch` more capacity, "
            "or use the index by expert"
        )
    if code == Code.DAMAGED:
        key, slot = detail >> 32 & 0xFFFFFFFF, detail & 0xFFFFFFFF
        return ExchangeError(
            f"weights arrived damaged in slot {slot} of rank {members.rank}, from rank {ranks[0]} (key {key} in the "
            "directory: layer x experts + expert); no output was sent",
            ranks,
        )
    return bad_expert("exchange peer", members.rank, detail)


def bad_expert(who: str, rank: int, detail: int) -> ConfigError:
    """For an id (its 64 bits, as the device writes them) that is no expert's."""
    expert = detail - (1 << 64) if detail >> 63 else detail
    if expert == NOT_FINITE:
        return ConfigError(
            f"{who}: a router of rank {rank} computed logits that are not finite; look at the hidden states that "
            "entered it, and at the weights"
        )
    return ConfigError(f"{who}: rank {rank} was given expert id {expert}, which does not exist")


def _ranks(mask: int) -> list[int]:
    return [rank for rank in range(32) if mask >> rank & 1]
