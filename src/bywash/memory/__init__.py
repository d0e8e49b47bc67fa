"""Memory that several ranks share: the symmetric heap, the words that order access to it, and waiting for them.

`open_heaps` gives every rank one heap and a mapping of everybody else's; `cells` holds the flag format and the one
ordering point; `wait_until` spins, yields, then sleeps. Knows nothing of tokens, plans or exchanges.
"""

from bywash.memory.cells import EPOCHS, arrived, epoch_of_step, flag, low32, require_store_order, store_release
from bywash.memory.heap import Heap, available_bytes
from bywash.memory.rendezvous import Members, open_heaps
from bywash.memory.waiting import sleep_until_ns, wait_until

__all__ = [
    "EPOCHS",
    "Heap",
    "Members",
    "arrived",
    "available_bytes",
    "epoch_of_step",
    "flag",
    "low32",
    "open_heaps",
    "require_store_order",
    "sleep_until_ns",
    "store_release",
    "wait_until",
]
