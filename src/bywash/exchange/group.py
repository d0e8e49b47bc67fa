"""`Group`: the ranks of one job, and who is to blame when one of them stops answering.

Built on torch.distributed's store and gloo. When a wait fails, the survivors first look at the process table
(same host), then call the roll through the store: a rank that does not answer is named. Nothing here costs
anything while all goes well, but for the two looks a second of `roll_call` in a job on several hosts. Knows nothing of
tokens or plans; exchanges and the model runner hold a `Group`.
"""

import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from bywash.errors import BywashError, ConfigError, ExchangeError, PlanMismatchError, RankLostError
from bywash.exchange.host_map import HostMap
from bywash.exchange.names import DEADLINE_S
from bywash.exchange.roll_call import RollCall, StoreLostError

_ROLL_CALL_S = 1.5
_LATE = "late: it did not arrive before the deadline"
_SILENT = "silent: it answers no roll call (gone, stopped, or cut off)"
PATIENCE_S = 3600.0
"""How long ranks wait for each other where one may honestly take much longer than another: loading weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Where a rank runs, so that others on its host can look at its process."""

    pid: int
    host: str
    started: str

    @property
    def host_name(self) -> str:
        """The name that people call the host by."""
        return self.host.partition("/")[0]

    def state(self) -> str:
        """`running`, `stopped` or `gone`, as the process table of this host says."""
        status = _proc_stat(self.pid)
        if status is None or status[0] in "ZX" or status[1] != self.started:
            return "gone"
        return "stopped" if status[0] in "Tt" else "running"


class Group:
    """One rank's view of the job.

    Attributes:
        rank, ranks: this process and how many there are.
        deadline_s: how long any wait on the others may take, seconds.
        peers: where every rank runs.
        process_group: what torch's collectives run in; None for the default one.
    """

    process_group: dist.ProcessGroup | None = None

    def __init__(self, *, rank: int, ranks: int, store: dist.Store, deadline_s: float = DEADLINE_S) -> None:
        """Join the group; returns when every rank has joined.

        Raises:
            RankLostError: a rank did not join before the deadline; the message names it.
        """
        if deadline_s <= 0:
            raise ConfigError(f"--deadline {deadline_s}: must be more than 0 seconds")
        self.rank, self.ranks, self.deadline_s = rank, ranks, deadline_s
        self._store = dist.PrefixStore("bywash", store)
        self._store.set_timeout(timedelta(seconds=deadline_s))
        self._shares = 0
        self._roll: RollCall | None = None
        self._silent: set[int] = set()
        self.peers: list[Peer] = []
        self._store.set(f"peer/{rank}", describe_this_process())
        self.peers = read_peers(self._from_all("peer", "joining the group"))
        with self.blame("joining the group"):
            # A connection of its own: who waits for a key there holds up all others on the same connection.
            theirs = self._store.clone()  # type: ignore[attr-defined]
            dist.init_process_group(
                "gloo", store=theirs, rank=rank, world_size=ranks, timeout=timedelta(seconds=deadline_s)
            )
        self._watch_other_hosts()

    @property
    def store(self) -> dist.Store:
        """Where ranks leave each other word."""
        return self._store

    @property
    def hosts(self) -> HostMap:
        """Which ranks share a host: its process table and its network."""
        return HostMap.of([peer.host for peer in self.peers])

    def agree(self, **facts: object) -> None:
        """Check that every rank was started with the same `facts` (names to JSON values).

        Raises:
            ConfigError: the first fact that differs, with the ranks and both values.
        """
        all_facts = [
            json.loads(text) for text in self.share(json.dumps(facts, sort_keys=True), "comparing configurations")
        ]
        for name, mine in all_facts[0].items():
            odd = [r for r, theirs in enumerate(all_facts) if theirs.get(name) != mine]
            if odd:
                raise ConfigError(
                    f"{name}: rank {odd[0]} was started with {all_facts[odd[0]].get(name)!r}, rank 0 with {mine!r}; "
                    "start every rank with the same options and files"
                )

    def share(self, value: str, during: str, limit_s: float | None = None) -> list[str]:
        """Every rank's `value`, by rank. Every rank makes the same calls in the same order.

        Raises:
            RankLostError: a rank died or did not share before the deadline, or before `limit_s`.
        """
        self._shares += 1
        key = f"share/{self._shares}"
        self._store.set(f"{key}/{self.rank}", value)
        return self._from_all(key, during, limit_s)

    def raise_if_gone(self, during: str) -> None:
        """Raise an error that names the ranks of this host whose process is gone or stopped, if there are any."""
        culprits = self.sick()
        if culprits:
            raise self.lost(culprits, during)

    def late(self, ranks: list[int], during: str) -> RankLostError:
        """The error for ranks that did not answer in time, with the reason where the process table shows one."""
        sick = self.sick()
        return self.lost({r: sick.get(r, _LATE) for r in ranks}, during)

    def tell(self, error: BywashError) -> None:
        """Leave word of why this rank gives up, for ranks of other hosts, who would take it for lost."""
        if self._roll is not None:
            self._roll.tell(type(error).__name__, str(error), getattr(error, "ranks", ()))

    @contextmanager
    def blame(self, during: str) -> Iterator[None]:
        """Turn a failed wait inside the block into an error that names the rank at fault."""
        start = time.monotonic()
        try:
            yield
        except BywashError:
            raise
        except (RuntimeError, dist.DistError) as error:
            waited = time.monotonic() - start
            found = self.verdict(f"{during} (waited {waited:.1f} s of {self.deadline_s:g} s)")
            self.tell(found)
            raise found from error

    def gather_counts(self, counts_E: NDArray[np.int32]) -> NDArray[np.int32]:
        """Every rank's counts, int32 [R, E]. Every rank calls.

        Raises:
            RankLostError: a rank is lost.
        """
        gathered = torch.empty(self.ranks, counts_E.size, dtype=torch.int32)
        with self.blame("gathering counts"):
            parts, mine = list(gathered.unbind(0)), torch.from_numpy(counts_E)
            self.end(dist.all_gather(parts, mine, group=self.process_group, async_op=True))
        return gathered.numpy()

    def end(self, work: dist.Work | None) -> None:
        """Wait for a collective, to the deadline, which the process group need not share. Inside `blame`.

        One that does not end leaves torch's process group with work that never does: no more may be given to it.
        """
        assert work is not None, "every rank is in the group, and the call was asynchronous"
        work.wait(timedelta(seconds=self.deadline_s))

    def close(self) -> None:
        """Leave the group. Safe to call twice and after an error."""
        self._leave_roll()
        if dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()

    def meet(self, during: str) -> None:
        """Wait until every rank is here, for as long as it takes one that is alive to read a large checkpoint.

        Raises:
            RankLostError: a rank died or was stopped, or did not come within `PATIENCE_S`.
        """
        self.share("here", during, max(PATIENCE_S, self.deadline_s))

    def _watch_other_hosts(self) -> None:
        if self.hosts.hosts > 1:
            self._roll = RollCall(self._store, self.rank, self.ranks)

    def _leave_roll(self) -> None:
        if self._roll is not None:
            self._roll.leave(self._silent)
            self._roll = None

    def _from_all(self, key: str, during: str, limit_s: float | None = None) -> list[str]:
        """Every rank's value of `key`, waiting for the late ones up to the deadline or `limit_s`."""
        keys = [f"{key}/{rank}" for rank in range(self.ranks)]
        limit_s = self.deadline_s if limit_s is None else limit_s
        end = time.monotonic() + limit_s
        while (missing := [r for r, k in enumerate(keys) if not self._store.check([k])]) and time.monotonic() < end:
            self.raise_if_gone(during)
            time.sleep(0.02)
        if missing:
            raise RankLostError(
                f"rank {_listed(missing)} did not answer while {during}, for {limit_s:g} s; is it running, "
                "and with the same number of ranks? (--deadline sets the wait)",
                missing,
            )
        return [self._store.get(k).decode() for k in keys]

    def sick(self) -> dict[int, str]:
        """Ranks on this host whose process is gone or stopped, with the word for it."""
        here = _host_identity()
        local = {r: p for r, p in enumerate(self.peers) if p.host == here and r != self.rank}
        states = {rank: peer.state() for rank, peer in local.items()}
        return {rank: state for rank, state in states.items() if state != "running"}

    def verdict(self, during: str) -> BywashError:
        """Find out who did not answer. Takes at most the time of one roll call and of asking what was told."""
        if self._roll is not None:
            return self._verdict_across_hosts(self._roll, during)
        answering: set[int] = set()
        end = time.monotonic() + _ROLL_CALL_S
        try:
            self._store.set(f"roll/{self.rank}", "here")
            while len(answering) < self.ranks and time.monotonic() < end:
                answering = {r for r in range(self.ranks) if self._store.check([f"roll/{r}"])}
                time.sleep(0.02)
        except (RuntimeError, dist.DistError):
            sick = self.sick() or {0: "unreachable (it holds the group's store)"}
            return self.lost(sick, during)
        sick = {r: s for r, s in self.sick().items() if r not in answering}
        if sick:
            return self.lost(sick, during)
        late = sorted(set(range(self.ranks)) - answering)
        if late:
            return self.lost({r: _LATE for r in late}, during)
        return ExchangeError(f"rank {self.rank}: the exchange failed while {during}, with every rank alive")

    def _verdict_across_hosts(self, roll: RollCall, during: str) -> BywashError:
        """A silent rank is lost, unless it has left word of whom it missed itself; after a word nobody is asked."""
        others = set(range(self.ranks)) - {self.rank}
        try:
            told, silent = roll.told(others), set[int]()
            if not told:
                silent = others - roll.call()
                told = roll.told(silent)
        except StoreLostError:
            return self.store_lost(during)
        for rank, word in sorted(told.items()):
            text = f"{word['text']}; rank {rank} told rank {self.rank} while {during}"
            if word["kind"] == PlanMismatchError.__name__:
                return PlanMismatchError(text, word["ranks"])
            if word["kind"] not in (RankLostError.__name__, ExchangeError.__name__):
                return ConfigError(text)
        sick = self.sick()
        named = {r for word in told.values() for r in word["ranks"]} - {self.rank}
        lost = {r: sick.get(r, _SILENT) for r in (silent - told.keys()) | named}
        if lost:
            self._silent = lost.keys() | told.keys()
            return self.lost(lost, during)
        return ExchangeError(
            f"rank {self.rank}: the exchange failed while {during}, with every rank alive: the network between "
            "hosts is too slow or loses packets (--deadline sets the wait)"
        )

    def store_lost(self, during: str) -> ExchangeError:
        """The error for a store that does not answer: its host, the first, is gone or cut off."""
        first, sick = self.hosts.members[0], self.sick()
        if self.rank not in first:
            sick = dict.fromkeys(first, "silent: the job's store, on its host, does not answer (gone or cut off)")
        if sick:
            return self.lost(sick, during)
        return ExchangeError(f"rank {self.rank}: the job's store does not answer while {during}")

    def lost(self, culprits: Mapping[int, str], during: str) -> RankLostError:
        """The error that names each culprit with its state, as `sick` gives it."""
        words = {"gone": "gone (killed, or exited with an error of its own)", "stopped": "stopped (SIGSTOP)"}
        texts = [f"host {name} is lost" for name in self._lost_hosts(culprits)]
        for rank, state in sorted(culprits.items()):
            where = f"pid {self.peers[rank].pid}" if rank < len(self.peers) else "not joined"
            if self.hosts.hosts > 1:
                where += f" on host {self.peers[rank].host_name}"
            texts.append(f"rank {rank} ({where}) is {words.get(state, state)}")
        return RankLostError(f"{'; '.join(texts)}; seen by rank {self.rank} while {during}", sorted(culprits))

    def _lost_hosts(self, culprits: Mapping[int, str]) -> list[str]:
        """The names of hosts of which no rank is left."""
        hosts = self.hosts.members if self.hosts.hosts > 1 else ()
        return [self.peers[ranks[0]].host_name for ranks in hosts if set(ranks) <= culprits.keys()]


def _listed(ranks: list[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)


def _proc_stat(pid: int) -> tuple[str, str] | None:
    """(state letter, start time in ticks) of a process, or None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]


def _host_identity() -> str:
    """One text per process table and network: host, boot, pid and network namespace."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Ranks of two network namespaces cannot reach each other's abstract sockets, by which they share memory.
        spaces = "/".join(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))
        return f"{socket.gethostname()}/{boot}/{spaces}"
    return f"{socket.gethostname()}/unknown"


def describe_this_process() -> str:
    """Where this rank runs, as text for `read_peers` of the others."""
    status = _proc_stat(os.getpid())
    return json.dumps({"pid": os.getpid(), "host": _host_identity(), "started": status[1] if status else ""})


def read_peers(texts: Iterable[str]) -> list[Peer]:
    """Where every rank runs, from what each said of itself."""
    return [Peer(**json.loads(text)) for text in texts]


def gather_objects(group: Group, value: Any) -> list[Any] | None:
    """Every rank's `value` on rank 0, None on the others. For results at the end of a run, not for data paths."""
    out: list[Any] | None = [None] * group.ranks if group.rank == 0 else None
    with group.blame("gathering results"):
        dist.gather_object(value, out)
    return out
