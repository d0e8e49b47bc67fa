"""64-bit words that ranks signal with: `{epoch:32 | value:32}`, and the one place that orders stores.

A word says in one store both *which step* it belongs to and *what* it says, so nothing is ever reset: a word of
another epoch has simply not arrived yet. Epoch 0 is never used, since a fresh heap is all zero.
"""

import platform

from bywash.errors import ConfigError

EPOCHS = 2**32 - 1
"""Distinct epochs before they repeat. Compared for equality only, so wrapping is harmless."""
_STORE_ORDERED = ("x86_64", "AMD64")


def epoch_of_step(step: int) -> int:
    """Epoch of the step-th use of a cell, 1..EPOCHS. Example: steps 0, 1, EPOCHS give 1, 2, 1."""
    return step % EPOCHS + 1


def flag(epoch: int, value: int) -> int:
    """Pack `{epoch | value}`. Example: flag(1, 7) is 0x1_0000_0007."""
    return epoch << 32 | value


def arrived(word: int, epoch: int) -> bool:
    """Whether a word read from a heap belongs to `epoch`."""
    return word >> 32 == epoch


def low32(word: int) -> int:
    """The value half of a word."""
    return word & 0xFFFFFFFF


def store_release(words: memoryview, index: int, word: int) -> None:
    """Store a word that makes everything this rank stored before it visible to whoever sees the word.

    The one ordering point of the package. On x86 stores become visible in program order, a store to an aligned
    8-byte word is one instruction, and memcpy fences its own streaming stores; calls into torch and numpy are opaque
    to the compiler. So a plain store is a release and a plain load an acquire. A machine with weaker ordering needs a
    fence here and one after the load in `wait_until`; `require_store_order` refuses such machines.
    """
    words[index] = word


def require_store_order() -> None:
    """Refuse machines on which `store_release` would not order anything.

    Raises:
        ConfigError: not an x86-64 machine.
    """
    machine = platform.machine()
    if machine not in _STORE_ORDERED:
        raise ConfigError(
            f"--exchange shm: this machine is {machine}; shared memory is used without fences, which is right on "
            f"{_STORE_ORDERED[0]} only. Use --exchange gloo here"
        )
