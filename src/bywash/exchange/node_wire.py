"""How slots and outputs travel between hosts: torch.distributed among the ranks that have the same index on each host.

NCCL on GPUs: a send and a receive for every wave and host, in one group call, on buffers that are registered with NCCL
where torch offers it. The calls return at once, are ordered by the current stream, and can be captured in a CUDA graph.
Schedules: `together` is one group call; `rotated` goes through the other hosts in turn, one to send to and one to
receive from at a time, each turn behind the one before (no incast).

NCCL's waits have no clock. `finished` is the host's, and `abort` ends them, so that a process outlives a lost host;
torch's own watchdog, which would end the process instead, is switched off for NCCL groups that the process opens from
then on, unless TORCH_NCCL_ASYNC_ERROR_HANDLING is set already. What opens and closes NCCL runs on a thread, for which
the caller waits until the group's deadline.

Knows nothing of what travels. `node_device` calls it; tests put a wire of their own in its place.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from bywash.errors import ConfigError
from bywash.exchange.group import Group
from bywash.exchange.host_map import HostMap
from bywash.exchange.node_schedule import Schedule

_POLL_S = 0.001
_NCCL_PATIENCE_S = 3600.0
"""Longer than any deadline of ours: the wait in `finished` is the one that counts."""


class NodeWire(Protocol):
    """Carries buffers between the ranks with this index. Every one of them makes the same calls."""

    device: str

    def buffers(self, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Tensors that `make` allocates, in memory that suits the wire."""

    def __call__(self, sent: Sequence[Sequence[Tensor]], got: Sequence[Sequence[Tensor]]) -> None:
        """Send and receive contiguous tensors, by other host; ready for the current stream when it goes on."""

    def finished(self, limit_s: float) -> bool:
        """Wait for the current stream, at most so long; whether it has run dry."""

    def abort(self) -> None:
        """End every wait on the wire for good."""


class NcclWire:
    """See the module.

    Attributes:
        group: the ranks with this index.
        registered: how many bytes of buffers NCCL has registered, or why none.
    """

    device = "cuda"
    backend: ClassVar[str] = "nccl"
    patience_s: ClassVar[float] = _NCCL_PATIENCE_S

    def __init__(
        self,
        group: dist.ProcessGroup,
        peers: Sequence[int],
        rank: int,
        schedule: Schedule,
        *,
        deadline_s: float,
        register: bool = True,
    ) -> None:
        """Hold the group; `peers` are the ranks with this index by host, `rank` included. For others: `open`."""
        self.group, self._peers, self._me, self._schedule = group, list(peers), list(peers).index(rank), schedule
        self._deadline_s, self._register = deadline_s, register
        self.registered = "no buffers yet"
        self._pools: list[object] = []
        self._ended = ""

    @classmethod
    def open(
        cls, group: Group, hosts: HostMap, schedule: Schedule = "together", *, register: bool = True
    ) -> "NcclWire":
        """Make the groups, one for each index. Every rank of the job calls, with its device current.

        Args:
            group: the job's ranks, in torch's default process group.
            hosts: which ranks share a host.
            schedule: see the module.
            register: whether to have NCCL register the buffers.

        Raises:
            ConfigError: hosts have unequal numbers of ranks, a schedule by the clock, or torch has no NCCL.
            RankLostError: a rank did not come before the group's deadline.
            ExchangeError: the network between hosts did not let them meet before it.
        """
        if schedule not in ("together", "rotated"):
            raise ConfigError(
                f"--node-schedule {schedule}: between GPUs the device sends, which has no clock: rotated?"
            )
        sizes = {len(ranks) for ranks in hosts.members}
        if len(sizes) > 1:
            raise ConfigError(
                f"exchange across hosts: hosts have {sorted(sizes)} ranks; start as many on each, since a rank's rows "
                "enter another host through the rank with the same number there"
            )
        if not dist.is_backend_available(cls.backend):
            raise ConfigError("exchange across hosts: this torch has no NCCL; use --exchange hierarchical on CPUs")
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        during = "connecting hosts by NCCL"
        group.share("here", during)
        found: list[tuple[dist.ProcessGroup, list[int]]] = []
        with group.blame(during):
            within(group.deadline_s, lambda: found.append(cls._connected(group.rank, hosts)))
        return cls(*found[0], group.rank, schedule, deadline_s=group.deadline_s, register=register)

    @classmethod
    def _connected(cls, rank: int, hosts: HostMap) -> tuple[dist.ProcessGroup, list[int]]:
        """This rank's group with its communicator made, which registering needs, and its members."""
        for index in range(len(hosts.members[0])):
            ranks = [host[index] for host in hosts.members]
            made = dist.new_group(ranks, backend=cls.backend, timeout=timedelta(seconds=cls.patience_s))
            if rank in ranks:
                mine, peers = made, ranks
        dist.all_reduce(torch.zeros(1, device=cls.device), group=mine)
        if cls.device == "cuda":
            torch.cuda.synchronize()
        return mine, peers

    def buffers(self, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """See `NodeWire`. In a pool that NCCL registers, so that a NIC can read and write it without a copy."""
        if not self._register:
            self.registered = "no: not asked for"
            return make()
        try:
            backend: Any = self.group._get_backend(torch.device("cuda"))
            pool = torch.cuda.MemPool(backend.mem_allocator)
            with torch.cuda.use_mem_pool(pool):
                tensors = make()
            backend.register_mem_pool(pool)
        except (RuntimeError, AttributeError) as error:
            self.registered = f"no: {str(error).splitlines()[0]}"
            return make()
        self._pools.append(pool)
        self.registered = f"{sum(tensor.nbytes for tensor in tensors):,} bytes"
        return tensors

    def __call__(self, sent: Sequence[Sequence[Tensor]], got: Sequence[Sequence[Tensor]]) -> None:
        """See `NodeWire`. Raises `ConfigError` once it is closed or aborted."""
        if self._ended:
            raise ConfigError(f"exchange across hosts: the wire is {self._ended}; open a new one")
        hosts = len(self._peers)
        turns = [[(self._me + d) % hosts] for d in range(1, hosts)]
        if self._schedule == "together":
            turns = [[host for turn in turns for host in turn]]
        for turn in turns:
            works = []
            for to in turn:
                source = (2 * self._me - to) % hosts  # as far behind this host as `to` is ahead
                for part in sent[to - (to > self._me)]:
                    works.append(dist.P2POp(dist.isend, part, self._peers[to], self.group))
                for part in got[source - (source > self._me)]:
                    works.append(dist.P2POp(dist.irecv, part, self._peers[source], self.group))
            for work in dist.batch_isend_irecv(works):
                work.wait()

    def finished(self, limit_s: float) -> bool:
        """See `NodeWire`."""
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream())
        end = time.monotonic() + limit_s
        while not done.query():
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_S)
        return True

    def abort(self) -> None:
        """See `NodeWire`."""
        self._ended = self._ended or "aborted"
        self.group._get_backend(torch.device(self.device)).abort()

    def close(self) -> None:
        """Leave the group and forget the buffers, which nobody may use any more. Every rank calls, also after `abort`.

        Safe to call twice. What has not ended by the deadline is aborted, which may take as long again.
        """
        if self._ended == "closed":
            return
        aborted, self._ended = bool(self._ended), "closed"
        try:
            within(self._deadline_s, lambda: dist.destroy_process_group(self.group))
        except (RuntimeError, ValueError):  # a host is gone, or the communicator or the whole job was ended before
            if not aborted:
                with suppress(RuntimeError):
                    within(self._deadline_s, self.abort)
        self._pools.clear()


def within(limit_s: float, action: Callable[[], None]) -> None:
    """Run on a thread what has no clock of its own, with this thread's device current.

    Raises:
        RuntimeError: it has not ended in time, and is left to itself; it must hold nothing that others need.
        Exception: what the action raised.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    raised: list[Exception] = []

    def work() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            action()
        except Exception as error:  # raised again where it is waited for
            raised.append(error)

    thread = threading.Thread(target=work, name="bywash: a call without a clock", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise RuntimeError(f"no end after {limit_s:g} s")
    if raised:
        raise raised[0]
