"""`hierarchical`: the exchange for several hosts. Each token crosses once to every host that computes for it.

The node leg takes a row to the *gateway*, the rank with the source's index on the other host; the inner leg (`shm`)
gives it to the ranks there that need it. Outputs go back the same way: summed inside the host (`fast`), summed per home
rank (`stable`), or all k of them (`exact`). With top-4 over two hosts a row crosses 0.94 times on average where a flat
all-to-all without deduplication sends 2. docs/hosts.md explains the protocol and what is promised when hosts are lost.

Shapes: T tokens of this rank, K experts per token, D hidden, R ranks, H hosts, E experts, P rows given out here (own
ones, then those of the sources that this rank is gateway for, in rank order), N rows received, M pairs.

`node_leg` carries messages between hosts, `inner_leg` rows inside one, `node_header` says what comes, `node_rows` and
`node_due` are the arithmetic; this file the order of events. Hosts may have unequal numbers of ranks (`HostMap`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bywash.balance import StepPlan
from bywash.errors import BywashError, ConfigError, ExchangeError, PlanMismatchError
from bywash.exchange import node_rows
from bywash.exchange.base import Exchange, Handle, Received
from bywash.exchange.gloo import GlooExchange
from bywash.exchange.group import Group
from bywash.exchange.host_map import HostMap
from bywash.exchange.inner_leg import InnerLeg
from bywash.exchange.names import Combine
from bywash.exchange.node_due import Due, due_by_host, due_words
from bywash.exchange.node_header import Header
from bywash.exchange.node_leg import Message, NodeLeg, Transfer
from bywash.exchange.node_rows import NodeRows, Outputs
from bywash.exchange.node_schedule import NodeSchedule
from bywash.exchange.rows import DTYPES
from bywash.routing import Routing


@dataclass(slots=True, kw_only=True)
class _Step:
    """One step in flight.

    Attributes:
        x_TD: this rank's rows.
        rows_H: what each host computes for them.
        kind: what comes back.
        rows: on their way to and from gateways.
        headers: of this rank and of those that it is gateway for, this one first.
        outputs: how many come back from each other host, and `due`: what crosses to each host in all; only where the
            schedule needs them.
        inner: the step of the inner leg.
        given: rows given out here, by the rank they belong to, this one first.
        names_PK, weights_PK: of the rows given out.
    """

    x_TD: Tensor
    rows_H: list[NodeRows]
    kind: Outputs
    rows: Transfer
    headers: dict[int, Header]
    outputs: list[int] | None
    due: Due | None
    inner: Handle | None = None
    given: dict[int, int] = field(default_factory=dict)
    names_PK: Tensor | None = None
    weights_PK: Tensor | None = None


class HierarchicalExchange(Exchange):
    """Rows deduplicated per host, between CPU ranks. Up to two steps may be in flight.

    `Received.rows_ND` lies in shared memory until `combine_start`; its rows are in the order of (gateway, source,
    token), and `rows_from_R` counts them by gateway.
    """

    name = "hierarchical"

    def __init__(
        self,
        group: Group,
        *,
        combine_mode: Combine = "exact",
        schedule: str = "together",
        hosts: HostMap | None = None,
    ) -> None:
        """Prepare; shared memory is opened by the first step, when its shape is known.

        Args:
            group: the ranks. Its `deadline_s` bounds every wait, its `hosts` says who shares one.
            combine_mode: see `Exchange`. `stable` gives the bits of the other exchanges' `stable`.
            schedule: of the node leg; see `NodeSchedule.parse`.
            hosts: ranks to treat as hosts, each of one real host; by default the real ones.

        Raises:
            ConfigError: unknown schedule, or too many ranks on a host.
        """
        super().__init__(rank=group.rank, ranks=group.ranks, combine_mode=combine_mode)
        self.group, self.hosts, self._schedule = group, hosts or group.hosts, NodeSchedule.parse(schedule)
        self._here = self.hosts.host_R[self.rank]
        self._leg = NodeLeg(group, self.hosts, self._schedule)
        self._gateways, self._sources = self.hosts.gateways(self.rank), self.hosts.sources(self.rank)
        self._weights = GlooExchange(group)  # copies weights into slots: rare, and each copy has one target
        self._inner: InnerLeg | None = None
        self._experts = 0
        self._failure: BywashError | None = None
        self._closed = False

    def counts(self, counts_E: NDArray[np.int32]) -> NDArray[np.int32]:
        """See `Exchange.counts`. Counts cross once to each host, and are then shared inside."""
        with self._telling():
            inner = self._open(counts_E.size)
            mine = torch.from_numpy(np.ascontiguousarray(counts_E, np.int32))
            into = {source: torch.empty_like(mine) for source in self._sources}
            self._leg.trade(Message.COUNTS, dict.fromkeys(self._gateways, mine), into, "gathering counts")
            counts_RE = self._spread(inner, {self.rank: mine} | into)
            self._count_bytes()
            return counts_RE

    def dispatch_start(self, x_TD: Tensor, routing: Routing, plan: StepPlan) -> Handle:
        """See `Exchange.dispatch_start`."""
        self._check_step(x_TD, routing, plan)
        with self._telling():
            inner = self._open(routing.num_experts)
            rows_H = node_rows.rows_per_host(routing, plan, self.rank, self.hosts)
            others = [rows for host, rows in enumerate(rows_H) if host != self._here]
            x_TD = x_TD.detach()
            outputs = self._outputs_per_host(rows_H, plan) if self._schedule.by_counts else None
            mine = self._header(x_TD, routing, plan, others, outputs)
            headers = self._trade_headers(mine, others)
            due = self._spread_due(inner, {self.rank: mine} | headers)
            record_bytes = x_TD.shape[1] * x_TD.element_size() + 8 * routing.top_k
            into = {rank: torch.empty(one.rows, record_bytes, dtype=torch.uint8) for rank, one in headers.items()}
            records = dict(zip(self._gateways, (_pack(x_TD, rows) for rows in others), strict=True))
            due_bytes_H = due.rows_H * record_bytes if due is not None else None
            step = _Step(
                x_TD=x_TD,
                rows_H=rows_H,
                kind=self._kind(plan),
                rows=self._leg.begin(Message.ROWS, records, into, "dispatching rows", due_bytes_H),
                headers={self.rank: mine} | headers,
                outputs=outputs,
                due=due,
            )
        self.traffic.rows_sent += sum(rows.tokens_P.numel() for rows in others)
        self.traffic.logical_bytes += 2 * int(mine.counts_E.sum()) * x_TD.shape[1] * x_TD.element_size()
        return Handle(routing=routing, plan=plan, state={"step": step})

    def dispatch_finish(self, handle: Handle) -> Received:
        """See `Exchange.dispatch_finish`."""
        handle.advance("dispatch_finish", "combine_start")
        step: _Step = handle.state["step"]
        with self._telling():
            inner = self._open(handle.routing.num_experts)
            rows_PD, step.names_PK, step.weights_PK = self._receive_rows(step)
            with self._inside(inner):
                step.inner = inner.begin(rows_PD, step.names_PK, step.weights_PK, handle.plan.digest)
                received = inner.arrive(step.inner)
            counts_RE = self._spread(inner, {rank: header.counts_E for rank, header in step.headers.items()})
        rows_from_R = np.zeros(self.ranks, np.int64)
        rows_from_R[list(self.hosts.members[self._here])] = received.rows_from_R
        self.traffic.steps += 1
        self._count_bytes()
        return Received(
            rows_ND=received.rows_ND,
            ids_NK=received.ids_NK,
            weights_NK=received.weights_NK,
            rows_from_R=rows_from_R.tolist(),
            counts_RE=counts_RE,
        )

    def combine_start(self, handle: Handle, y_MD: Tensor) -> None:
        """See `Exchange.combine_start`: outputs go to the gateways; `combine_finish` takes them across."""
        handle.advance("combine_start", "combine_finish")
        step: _Step = handle.state["step"]
        with self._telling():
            inner = self._open(handle.routing.num_experts)
            assert step.inner is not None, "dispatch_finish sets it"
            with self._inside(inner):
                inner.combine_start(step.inner, y_MD)

    def combine_finish(self, handle: Handle) -> Tensor:
        """See `Exchange.combine_finish`."""
        handle.advance("combine_finish", "done")
        step: _Step = handle.state["step"]
        with self._telling():
            back = self._outputs_of_host(step, handle)
            parts = self._trade_outputs(step, handle, back)
        handle.state.clear()
        self._count_bytes()
        if step.kind == "sum":
            return node_rows.add_sums(parts, step.rows_H, step.x_TD)
        if step.kind == "homes":
            return node_rows.add_homes(parts, step.rows_H, handle.routing, handle.plan)
        add = node_rows.add_pairs
        if self.combine_mode == "stable":
            return node_rows.add_pairs_by_home(parts, step.rows_H, handle.routing, handle.plan)
        return add(parts, step.rows_H, handle.routing)

    def open_slots(self, slots: int, slot_bytes: int) -> Tensor:
        """See `Exchange.open_slots`."""
        return self._weights.open_slots(slots, slot_bytes)

    def fetch(self, donor_RS: NDArray[np.int32], digest: int, read: Callable[[int, int], Tensor]) -> None:
        """See `Exchange.fetch`. Weights go straight from donor to slot, over sockets inside a host too."""
        with self._telling():
            self._weights.fetch(donor_RS, digest, read)
        self.traffic.weight_bytes = self._weights.traffic.weight_bytes

    def close(self) -> None:
        """See `Exchange.close`. The group belongs to the caller and stays open."""
        self._closed = True
        if self._inner is not None:
            self._inner.close()

    def _kind(self, plan: StepPlan) -> Outputs:
        """What comes back across: a home rank's sum cannot be made on a host where only some of its pairs ran."""
        if self.combine_mode == "stable" and not plan.spilled:
            return "homes"
        return "sum" if self.combine_mode == "fast" else "pairs"

    def _open(self, experts: int) -> InnerLeg:
        """The inner leg, opened by the first step. Every rank calls."""
        if self._failure is not None:
            first = self._failure
            raise type(first)(str(first), first.ranks) if isinstance(first, ExchangeError) else type(first)(str(first))
        if self._closed:
            raise ConfigError("exchange hierarchical: closed; open a new one")
        if self._inner is None:
            facts = {"--exchange": self.name, "--combine": self.combine_mode, "--node-schedule": str(self._schedule)}
            self.group.agree(**facts, experts=experts, hosts=self.hosts.members)
            most = max(len(self.hosts.sources(rank)) for rank in self.hosts.members[self._here])
            self._inner = InnerLeg(
                self.group,
                self.hosts.neighbours(self.rank),
                experts=experts,
                parts=1 + most,
                words=max(experts, self.hosts.hosts + 1),
                sums=self.combine_mode == "fast",
            )
            self._experts = experts
        if experts != self._experts:
            raise ConfigError(f"exchange hierarchical: {experts} experts, but it was opened for {self._experts}")
        return self._inner

    def _check_step(self, x_TD: Tensor, routing: Routing, plan: StepPlan) -> None:
        if plan.rows_R.size != self.ranks or plan.rank_E.size != routing.num_experts:
            raise ConfigError(
                f"exchange hierarchical: a plan for {plan.rows_R.size} ranks and {plan.rank_E.size} experts; this step "
                f"has {self.ranks} and {routing.num_experts}"
            )
        if x_TD.dtype not in DTYPES or x_TD.device.type != "cpu" or x_TD.dim() != 2:
            raise ConfigError(f"exchange hierarchical: rows are {x_TD.dtype} on {x_TD.device}, not {DTYPES} on cpu")
        if x_TD.shape[0] != routing.tokens:
            raise ConfigError(f"exchange hierarchical: rows {list(x_TD.shape)} for {routing.tokens} routed tokens")

    def _header(
        self, x_TD: Tensor, routing: Routing, plan: StepPlan, others: list[NodeRows], outputs: list[int] | None
    ) -> Header:
        """This rank's, with what `by-counts` wants known."""
        due_W = np.empty(0, np.int32)
        if outputs is not None:
            due_W = due_words([rows.tokens_P.numel() for rows in others], sum(outputs), self._here)
        return Header(
            digest=plan.digest,
            shape=(x_TD.shape[1], routing.top_k, DTYPES.index(x_TD.dtype)),
            counts_E=routing.counts_E().to(torch.int32),
            due_W=torch.from_numpy(due_W),
        )

    def _outputs_per_host(self, rows_H: list[NodeRows], plan: StepPlan) -> list[int]:
        """How many come back to this rank from each other host."""
        kind, others = self._kind(plan), (rows for host, rows in enumerate(rows_H) if host != self._here)
        return [node_rows.outputs_per_host(rows, kind, self._experts, plan.rank_E) for rows in others]

    def _trade_headers(self, mine: Header, others: list[NodeRows]) -> dict[int, Header]:
        """Tell gateways what will come; every source's header, checked: same plan, same shapes."""
        words = {
            gateway: mine.words(rows.tokens_P.numel()) for gateway, rows in zip(self._gateways, others, strict=True)
        }
        into = {rank: torch.empty(mine.size, dtype=torch.int32) for rank in self._sources}
        self._leg.trade(Message.HEADER, words, into, "agreeing on the plan")
        headers = {rank: mine.read(theirs) for rank, theirs in into.items()}
        for rank, theirs in headers.items():
            mine.check(theirs, rank, self.rank)
        return headers

    def _spread_due(self, inner: InnerLeg, headers: dict[int, Header]) -> Due | None:
        """What each host is due in this step, for the schedule that asks."""
        if not self._schedule.by_counts:
            return None
        return due_by_host(self._spread(inner, {rank: header.due_W for rank, header in headers.items()}), self.hosts)

    def _receive_rows(self, step: _Step) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, names and weights of all tokens that this rank gives out: own ones, then each source's."""
        own, top_k = step.rows_H[self._here], step.rows_H[0].names_PK.shape[1]
        row_bytes = step.x_TD.shape[1] * step.x_TD.element_size()
        self._leg.finish(step.rows, "waiting for dispatched rows")
        into = step.rows.into
        step.given = {self.rank: own.tokens_P.numel()} | {rank: part.shape[0] for rank, part in into.items()}
        came = torch.cat(list(into.values())) if into else torch.empty(0, row_bytes + 8 * top_k, dtype=torch.uint8)
        rows, names, weights = (
            part.clone(memory_format=torch.contiguous_format)
            for part in came.split([row_bytes, 4 * top_k, 4 * top_k], dim=1)
        )
        return (
            torch.cat([step.x_TD[own.tokens_P], rows.view(step.x_TD.dtype)]),
            torch.cat([own.names_PK, names.view(torch.int32).long()]),
            torch.cat([own.weights_PK, weights.view(torch.float32)]),
        )

    def _outputs_of_host(self, step: _Step, handle: Handle) -> dict[int, Tensor]:
        """What this host computed for the rows given out here, by the rank they belong to."""
        inner = self._open(handle.routing.num_experts)
        assert step.inner is not None, "dispatch_finish sets it"
        assert step.names_PK is not None, "dispatch_finish sets it"
        assert step.weights_PK is not None, "dispatch_finish sets it"
        with self._inside(inner):
            y = inner.combine_finish(step.inner) if step.kind == "sum" else inner.combine_pairs(step.inner)
        per_row = torch.ones(y.shape[0], dtype=torch.int64)
        if step.kind == "pairs":
            per_row = (step.names_PK >= 0).sum(dim=1)
        elif step.kind == "homes":
            names, rank_E = step.names_PK, handle.plan.rank_E
            y = node_rows.sum_homes(y, names, step.weights_PK, self._experts, rank_E)
            row_O = node_rows.home_order(names, self._experts, rank_E)[0]
            per_row = torch.bincount(row_O, minlength=names.shape[0])
        sizes = [int(part.sum()) for part in per_row.split(list(step.given.values()))]
        return dict(zip(step.given, y.split(sizes), strict=True))

    def _trade_outputs(self, step: _Step, handle: Handle, back: dict[int, Tensor]) -> list[Tensor]:
        """Send outputs home across, and get those for this rank's tokens: by host."""
        sent = {rank: _as_bytes(part) for rank, part in back.items() if rank != self.rank}
        row_bytes = step.x_TD.shape[1] * step.x_TD.element_size()
        sizes = self._outputs_per_host(step.rows_H, handle.plan) if step.outputs is None else step.outputs
        into = {
            rank: torch.empty(size, row_bytes, dtype=torch.uint8)
            for rank, size in zip(self._gateways, sizes, strict=True)
        }
        due_bytes_H = step.due.outputs_H * row_bytes if step.due is not None else None
        self._leg.trade(Message.OUTPUTS, sent, into, "waiting for outputs", due_bytes_H)
        self.traffic.rows_returned += sum(part.shape[0] for part in sent.values())
        parts = [part.view(step.x_TD.dtype).view(-1, step.x_TD.shape[1]) for part in into.values()]
        parts.insert(self._here, back[self.rank])
        return parts

    def _spread(self, inner: InnerLeg, known: dict[int, Tensor]) -> NDArray[np.int32]:
        """Every rank's int32 [W] words as [R, W], from those that each gateway of this host has, its own first."""
        with self._inside(inner):
            words_LSW = inner.share(torch.stack(list(known.values())).numpy())
        words_RW = np.empty((self.ranks, words_LSW.shape[2]), np.int32)
        for rank, words_SW in zip(self.hosts.members[self._here], words_LSW, strict=True):
            for source, words_W in zip([rank, *self.hosts.sources(rank)], words_SW, strict=False):
                words_RW[source] = words_W
        return words_RW

    def _count_bytes(self) -> None:
        inside = self._inner.traffic.wire_bytes if self._inner is not None else 0
        self.traffic.host_bytes = self._leg.sent_bytes
        self.traffic.wire_bytes = self._leg.sent_bytes + inside

    @contextmanager
    def _inside(self, inner: InnerLeg) -> Iterator[None]:
        """Put errors of the inner leg in terms of the job."""
        try:
            yield
        except BywashError as error:
            raise self._cause(inner.in_the_job(error)) from error

    def _cause(self, error: BywashError) -> BywashError:
        """A neighbour that runs, but is late or has given up, may have waited for another host: ask who is silent."""
        if isinstance(error, PlanMismatchError) or not isinstance(error, ExchangeError):
            return error
        if self.group.hosts.hosts == 1 or set(error.ranks) & self.group.sick().keys():
            return error
        across = self.group.verdict(str(error))
        if isinstance(across, ExchangeError) and not across.ranks:
            return ExchangeError(f"{error}; it answers, so it is slow, or waits for another host itself")
        return across

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Remember an error, and let everybody know that this rank gives up."""
        try:
            yield
        except BywashError as error:
            if self._failure is None:
                self._failure = error
                self.group.tell(error)  # before the neighbours, who will look for it
                if self._inner is not None:
                    self._inner.tell(error)
            raise


def _pack(x_TD: Tensor, rows: NodeRows) -> Tensor:
    """uint8 [P, record]: hidden vector, K int32 names, K float32 weights."""
    parts = (x_TD[rows.tokens_P], rows.names_PK.to(torch.int32), rows.weights_PK)
    return torch.cat([_as_bytes(part) for part in parts], dim=1)


def _as_bytes(rows: Tensor) -> Tensor:
    if rows.shape[0] == 0:  # a tensor of no rows may have any strides, which view() refuses
        return torch.empty(0, rows.shape[1] * rows.element_size(), dtype=torch.uint8)
    return rows.contiguous().view(torch.uint8)
