"""`Group`: the ranks of one job, and who is to blame when one of them stops answering.

Built on torch.distributed's store and gloo. When a wait fails, the survivors first look at the process table
(same host), then call the roll through the store: a rank that does not answer is named. Nothing here costs
anything while all goes well. Knows nothing of tokens or plans; exchanges and the model runner hold a `Group`.
"""

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bywash.errors import BywashError, ConfigError, ExchangeError, RankLostError
from bywash.exchange.names import DEADLINE_S

_ROLL_CALL_S = 1.5
PATIENCE_S = 3600.0
"""How long ranks wait for each other where one may honestly take much longer than another: loading weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Where a rank runs, so that others on its host can look at its process."""

    pid: int
    host: str
    started: str

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
    """

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
        self.peers: list[Peer] = []
        me = _this_process()
        self._store.set(f"peer/{rank}", json.dumps({"pid": me.pid, "host": me.host, "started": me.started}))
        self.peers = [Peer(**json.loads(text)) for text in self._from_all("peer", "joining the group")]
        with self.blame("joining the group"):
            dist.init_process_group(
                "gloo", store=self._store, rank=rank, world_size=ranks, timeout=timedelta(seconds=deadline_s)
            )

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
        return self.lost({r: sick.get(r, "late: it did not arrive before the deadline") for r in ranks}, during)

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
            raise self._verdict(f"{during} (waited {waited:.1f} s of {self.deadline_s:g} s)") from error

    def close(self) -> None:
        """Leave the group. Safe to call twice and after an error."""
        if dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()

    def meet(self, during: str) -> None:
        """Wait until every rank is here, for as long as it takes one that is alive to read a large checkpoint.

        Raises:
            RankLostError: a rank died or was stopped, or did not come within `PATIENCE_S`.
        """
        self.share("here", during, max(PATIENCE_S, self.deadline_s))

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

    def _verdict(self, during: str) -> ExchangeError:
        """Find out who did not answer. Takes at most the time of one roll call."""
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
            return self.lost({r: "late: it did not arrive before the deadline" for r in late}, during)
        return ExchangeError(f"rank {self.rank}: the exchange failed while {during}, with every rank alive")

    def lost(self, culprits: Mapping[int, str], during: str) -> RankLostError:
        """The error that names each culprit with its state, as `sick` gives it."""
        words = {"gone": "gone (killed, or exited with an error of its own)", "stopped": "stopped (SIGSTOP)"}
        texts = []
        for rank, state in sorted(culprits.items()):
            where = f"pid {self.peers[rank].pid}" if rank < len(self.peers) else "not joined"
            texts.append(f"rank {rank} ({where}) is {words.get(state, state)}")
        return RankLostError(f"{'; '.join(texts)}; seen by rank {self.rank} while {during}", sorted(culprits))


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
    """One text per process table: host, boot and pid namespace."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    return f"{socket.gethostname()}/unknown"


def _this_process() -> Peer:
    status = _proc_stat(os.getpid())
    return Peer(pid=os.getpid(), host=_host_identity(), started=status[1] if status else "")


def gather_objects(group: Group, value: Any) -> list[Any] | None:
    """Every rank's `value` on rank 0, None on the others. For results at the end of a run, not for data paths."""
    out: list[Any] | None = [None] * group.ranks if group.rank == 0 else None
    with group.blame("gathering results"):
        dist.gather_object(value, out)
    return out
