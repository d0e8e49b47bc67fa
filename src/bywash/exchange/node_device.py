"""`NodeDevice`: the exchange between GPUs of several hosts, in the calls of `PeerDevice`. No host in the loop.

A token's row goes once to every other host that computes for it, to the *gateway*, the rank with the source's index
there (node leg, `node_wire`); the gateway gives it out inside its host as if it were its own (inner leg, `PeerDevice`
among the ranks of the host). Outputs return the same way: one sum for each (token, host), or with `exact` all k of
them. Sizes on the node leg are fixed, see `node_layout`; how many slots are filled only the device knows. Every call
only launches, so a step can be captured in a CUDA graph. docs/hosts.md explains what is promised.

Every message carries the plan's digest and whether its sender has failed; both are looked at before its rows are used.
After a failure nothing of other ranks is computed, and `check` raises on every rank.

Shapes: T tokens of this rank, K experts per token, D hidden, H hosts, O other hosts, S slots, P = T + S rows given out
here, E experts, M pairs computed here, J outputs that come back for a row.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bywash.balance.plan import digest32
from bywash.errors import BywashError, ConfigError, ExchangeError, PlanMismatchError, RankLostError
from bywash.exchange import node_pack
from bywash.exchange.group import Group
from bywash.exchange.host_map import HostMap
from bywash.exchange.node_layout import NodeLayout
from bywash.exchange.node_pack import Packed, Tables
from bywash.exchange.node_wire import NodeWire
from bywash.exchange.part import Part
from bywash.exchange.peer_device import PeerDevice
from bywash.exchange.peer_errors import bad_expert
from bywash.exchange.peer_layout import GENERATIONS
from bywash.exchange.peer_tensors import Channels, DeviceReceived, expect
from bywash.memory.rendezvous import Members

_DIGEST, _FAILED = 0, 1
_HEADER_WORDS = 4
_MISMATCH, _THEIRS, _TOLD, _EXPERT, _TOKENS, _MOST = range(6)
"""Words of a failure record: a mask of hosts, a digest, a mask of hosts, an id, a count, the most rows for a host."""
_BROKEN = -(1 << 40)
"""An expert id that makes the inner leg fail, so that every rank of the host learns of a failure on the node leg."""


@dataclass(slots=True, kw_only=True)
class _Channel:
    """One generation: buffers of the node leg, and the step in flight.

    Attributes:
        rows_SD, meta_SJ, header_OW: what is sent; `back_SD` and `status_OW` are what returns.
        x_PD: rows given out: own ones, then those that come in.
        came_SJ, came_OW: the rest of what comes in.
        names_PK, weights_PK: of the rows given out.
        waves: of the step in flight.
    """

    rows_SD: Tensor
    meta_SJ: Tensor
    header_OW: Tensor
    x_PD: Tensor
    came_SJ: Tensor
    came_OW: Tensor
    back_SD: Tensor
    status_OW: Tensor
    names_PK: Tensor
    weights_PK: Tensor
    waves: int = 0
    known_TK: Tensor | None = None
    own_weights_TK: Tensor | None = None
    packed: Packed | None = None
    held: tuple[Tensor, ...] = ()


class _Inner(PeerDevice):
    """The inner leg, which says on the device whether it has failed."""

    @property
    def failed(self) -> Tensor:
        """int64 [1], not 0 after a failure."""
        return self._failure[:1]


class NodeDevice:
    """One rank's device end. Every rank makes the same calls in the same order; generations are independent."""

    def __init__(
        self,
        group: Group,
        layout: NodeLayout,
        rank_E: NDArray[np.int32],
        wire: NodeWire,
        *,
        hosts: HostMap | None = None,
        inner_members: Members | None = None,
    ) -> None:
        """Open the inner leg and the buffers. Every rank calls.

        Args:
            group: the ranks. Its `deadline_s` bounds every wait.
            layout: sizes, equal on all ranks.
            rank_E: int32 [E], the home of every expert.
            wire: to the ranks with this index on other hosts, such as `NcclWire.open(group, hosts, "together")`.
            hosts: ranks to treat as hosts; by default the real ones.
            inner_members: the ranks of this host, for tests; by default a part of `group`.

        Raises:
            ConfigError: sizes that do not fit together or differ between ranks, no GPU, memory that does not fit.
            RankLostError: a rank did not come.
        """
        self.hosts = hosts or group.hosts
        if (self.hosts.hosts, len(rank_E)) != (layout.hosts, layout.experts):
            raise ConfigError(
                f"exchange across hosts: a layout for {layout.hosts} hosts and {layout.experts} experts; there are "
                f"{self.hosts.hosts} and {len(rank_E)}"
            )
        self.rank, self.ranks, self.node = group.rank, group.ranks, layout
        self._group, self.wire, here = group, wire, self.hosts.host_R[group.rank]
        group.agree(**{"node layout": repr(layout), "hosts": self.hosts.members, "experts' ranks": rank_E.tolist()})
        host_E = np.asarray(self.hosts.host_R)[rank_E]
        index_E = np.asarray(self.hosts.index_R, np.int32)[rank_E[host_E == here]]
        members = inner_members or Part(group, self.hosts.neighbours(group.rank))
        self.layout = layout.inner(index_E.size)
        self.inner = _Inner(
            members,
            self.layout,
            index_E if index_E.size else np.zeros(1, np.int32),
            combine_mode="exact" if layout.pairs else layout.combine,
        )
        self._failure: BywashError | None = None
        with torch.inference_mode(False):  # buffers outlive the model's inference mode
            self.tables = Tables.of(rank_E, self.hosts, here, wire.device)
            digest = digest32(rank_E)
            self._digest = torch.tensor(digest - (digest >> 31 << 32), dtype=torch.int32, device=wire.device)
            self._words = torch.zeros(6, dtype=torch.int64, device=wire.device)
            self._words[_EXPERT] = -1
            self._bits_O = 1 << self.tables.others_O
            channels = [self._open_channel() for _ in range(GENERATIONS)]
        self._channels = Channels("exchange across hosts", channels)

    def dispatch(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        tokens: Tensor | None = None,
        generation: int = 0,
        counts_first: bool = True,
        waves: int | None = None,
    ) -> DeviceReceived:
        """Both legs; see `PeerDevice.dispatch_start` for the arguments.

        With `exact` (and `stable` with several ranks a host) what arrives has a row for each pair.

        Args:
            x_TD, ids_TK, weights_TK, tokens, generation, counts_first: as there.
            waves: how many to send, the same on all ranks; by default all, so that nothing can overflow. With fewer,
                ask `overflowed` before the step's results are used.

        Raises:
            ConfigError: shapes that do not fit, more waves than there are, or fewer than one.
            RankLostError: NCCL knows at once that another host is gone; else `check` finds out.
        """
        layout, channel = self.node, self._channels[generation]
        channel.waves = layout.waves if waves is None else waves
        self._check_arguments(x_TD, ids_TK, weights_TK, tokens, channel.waves)
        known_TK = self._known(ids_TK, tokens)
        packed = node_pack.pack(known_TK, weights_TK, self.tables, layout, channel.waves)
        self._words[_MOST:] = torch.maximum(self._words[_MOST:], packed.most)
        channel.known_TK, channel.own_weights_TK, channel.packed = known_TK, weights_TK, packed
        rows, slots = x_TD.shape[0], layout.slots(channel.waves)
        if rows:
            torch.index_select(x_TD, 0, packed.token_S, out=channel.rows_SD[:slots])
        channel.meta_SJ[:slots] = packed.meta_SJ
        channel.header_OW[:, _DIGEST] = self._digest
        channel.header_OW[:, _FAILED] = self._broken()
        came = channel.x_PD[layout.tokens : layout.tokens + slots]
        self._cross(
            self._by_host([channel.rows_SD, channel.meta_SJ], channel.header_OW, channel.waves),
            self._by_host([came, channel.came_SJ], channel.came_OW, channel.waves),
        )
        self._read_headers(channel.came_OW)
        channel.x_PD[:rows] = x_TD
        self._name_rows(channel, rows, slots)
        return self._give_out(channel, slots, generation, counts_first)

    def combine(self, y_MD: Tensor, *, generation: int = 0, pushed: bool = False) -> Tensor:
        """Both legs; see `PeerDevice.combine`."""
        layout, channel = self.node, self._channels[generation]
        if channel.packed is None or channel.known_TK is None or channel.own_weights_TK is None:
            raise ConfigError(f"exchange across hosts: combine before any dispatch in generation {generation}")
        out_PD = self.inner.combine(y_MD, generation=generation, pushed=pushed)
        channel.held = (*channel.held, out_PD)
        per_row, slots = layout.outputs, layout.slots(channel.waves)
        channel.header_OW[:, _FAILED] = self._broken()
        self._cross(
            self._by_host([out_PD[layout.tokens * per_row :]], channel.header_OW, channel.waves, per_row),
            self._by_host([channel.back_SD], channel.status_OW, channel.waves, per_row),
        )
        self._read_headers(channel.status_OW)
        own = out_PD[: channel.known_TK.shape[0] * per_row]
        back, place_OT = channel.back_SD[: slots * per_row], channel.packed.place_OT
        if not layout.pairs:
            return node_pack.add_hosts(own, back, place_OT, self.tables)
        add = node_pack.add_pairs if layout.combine == "exact" else node_pack.add_homes
        return add(own, back, place_OT, channel.known_TK, channel.own_weights_TK, self.tables)

    def check(self) -> None:
        """Wait for the current stream and raise what went wrong, if anything did. Nothing works after a failure.

        Steps must have been launched on it, or it must wait for them.

        Raises:
            RankLostError, PlanMismatchError, ConfigError: with the ranks at fault.
        """
        error = self.failure()
        if error is not None:
            raise error

    def failure(self) -> BywashError | None:
        """What `check` would raise, or None."""
        if self._failure is None:
            self._failure = self._find_failure()
            if self._failure is not None:
                self._group.tell(self._failure)
        return self._failure

    def overflowed(self) -> int:
        """After `check`: the waves that the fullest step since the last call needed on any rank. Every rank calls.

        If they are more than were launched, the results of those steps are not to be used: repeat them with more.
        Ranks agree through the host, so ask once at the end of a model's step.
        """
        most = int(self._words[_MOST])
        self._words[_MOST] = 0
        shared = self._group.share(str(-(-most // self.node.capacity)), "comparing how many waves were needed")
        return max(int(waves) for waves in shared)

    def close(self) -> None:
        """Drop the buffers. Safe to call twice. The wire is its maker's to close, afterwards."""
        self.inner.close()
        self._channels = Channels("exchange across hosts")

    def _open_channel(self) -> _Channel:
        layout, device = self.node, self.wire.device
        slots, rows = layout.slots(layout.waves), layout.tokens + layout.slots(layout.waves)

        def wired() -> list[Tensor]:
            return [
                torch.zeros(slots, layout.hidden, dtype=layout.dtype, device=device),
                torch.zeros(rows, layout.hidden, dtype=layout.dtype, device=device),
                torch.zeros(slots * layout.outputs, layout.hidden, dtype=layout.dtype, device=device),
                torch.zeros(slots, 2 * layout.top_k, dtype=torch.int32, device=device),
                torch.zeros(slots, 2 * layout.top_k, dtype=torch.int32, device=device),
                *(torch.zeros(layout.others, _HEADER_WORDS, dtype=torch.int32, device=device) for _ in range(3)),
            ]

        rows_SD, x_PD, back_SD, meta_SJ, came_SJ, header_OW, came_OW, status_OW = self.wire.buffers(wired)
        return _Channel(
            rows_SD=rows_SD,
            meta_SJ=meta_SJ,
            header_OW=header_OW,
            x_PD=x_PD,
            came_SJ=came_SJ,
            came_OW=came_OW,
            back_SD=back_SD,
            status_OW=status_OW,
            names_PK=torch.full((rows, layout.top_k), -1, dtype=torch.int64, device=device),
            weights_PK=torch.zeros(rows, layout.top_k, device=device),
        )

    def _check_arguments(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, tokens: Tensor | None, waves: int
    ) -> None:
        layout, rows = self.node, x_TD.shape[0]
        expect("x", x_TD, (rows, layout.hidden), layout.dtype)
        expect("ids", ids_TK, (rows, layout.top_k), torch.int64)
        expect("weights", weights_TK, (rows, layout.top_k), torch.float32)
        if tokens is not None:
            expect("tokens", tokens, (1,), torch.int32)
        if rows > layout.tokens:
            raise ConfigError(f"exchange across hosts: a step of {rows} tokens, it was opened for {layout.tokens}")
        if not 1 <= waves <= layout.waves:
            raise ConfigError(f"exchange across hosts: {waves} waves; 1 to {layout.waves} of {layout.capacity} rows")

    def _known(self, ids_TK: Tensor, tokens: Tensor | None) -> Tensor:
        """Ids, -1 in rows that are padding and where an id is no expert's, which is written down."""
        rows = ids_TK.shape[0]
        if tokens is not None:
            at_T = torch.arange(rows, device=ids_TK.device)
            ids_TK = torch.where(at_T[:, None] < tokens, ids_TK, -1)
            wrong = (tokens < 0) | (tokens > rows)
            self._words[_TOKENS : _TOKENS + 1] += torch.where(wrong, tokens.long().abs(), 0)
        bad_TK = (ids_TK < -1) | (ids_TK >= self.node.experts)
        if rows:
            # Any of them will do: the largest, or where all are below -1 the smallest.
            high, low = torch.where(bad_TK, ids_TK, -1).amax(), torch.where(bad_TK, ids_TK, -1).amin()
            found = torch.where(high > -1, high, low)
            self._words[_EXPERT] = torch.where(self._words[_EXPERT] == -1, found, self._words[_EXPERT])
        return torch.where(bad_TK, -1, ids_TK)

    def _cross(self, sent: list[list[Tensor]], got: list[list[Tensor]]) -> None:
        """The wire; what fails at once is named at once."""
        if self._failure is not None:
            raise self._failure
        try:
            with self._group.blame("exchanging rows with other hosts"):
                self.wire(sent, got)
        except BywashError as error:
            self._failure = error
            self.wire.abort()
            raise

    def _broken(self) -> Tensor:
        """int32 []: whether this rank has failed, or been told that another has."""
        words = self._words
        own = (words[_MISMATCH] != 0) | (words[_TOLD] != 0) | (words[_EXPERT] != -1) | (words[_TOKENS] != 0)
        return (own | (self.inner.failed[0] != 0)).to(torch.int32)

    def _read_headers(self, came_OW: Tensor) -> None:
        differs_O = came_OW[:, _DIGEST] != self._digest
        theirs = torch.where(differs_O, came_OW[:, _DIGEST].long() & 0xFFFFFFFF, 0).amax()
        self._words[_THEIRS] = torch.maximum(self._words[_THEIRS], theirs)
        for word, found_O in ((_MISMATCH, differs_O), (_TOLD, came_OW[:, _FAILED] != 0)):
            self._words[word] |= torch.where(found_O, self._bits_O, 0).sum()

    def _name_rows(self, channel: _Channel, rows: int, slots: int) -> None:
        """What the inner leg is told of each row: nothing is computed for others once anything has failed."""
        assert channel.packed is not None, "set by dispatch"
        assert channel.own_weights_TK is not None, "set by dispatch"
        first, top_k = self.node.tokens, self.node.top_k
        broken = self._broken() != 0
        channel.names_PK[:rows] = channel.packed.own_TK
        channel.names_PK[rows:first] = -1
        channel.names_PK[first : first + slots] = channel.came_SJ[:slots, :top_k]
        channel.names_PK.masked_fill_(broken, -1)
        channel.names_PK[0, 0] = torch.where(broken, _BROKEN, channel.names_PK[0, 0])
        channel.weights_PK[:rows] = channel.own_weights_TK
        channel.weights_PK[first : first + slots] = channel.came_SJ[:slots, top_k:].contiguous().view(torch.float32)

    def _give_out(self, channel: _Channel, slots: int, generation: int, counts_first: bool) -> DeviceReceived:
        rows = self.node.tokens + slots
        x, names, weights = channel.x_PD[:rows], channel.names_PK[:rows], channel.weights_PK[:rows]
        if self.node.pairs:
            x = x.repeat_interleave(self.node.top_k, dim=0)
            names = names.reshape(-1, 1)
            weights = torch.ones(names.shape, dtype=torch.float32, device=names.device)
        channel.held = (x, names, weights)
        return self.inner.dispatch(x, names, weights, generation=generation, counts_first=counts_first)

    def _by_host(self, parts: list[Tensor], header_OW: Tensor, waves: int, per_row: int = 1) -> list[list[Tensor]]:
        """For each other host its header and its piece of every wave of `parts`."""
        rows, others = self.node.capacity * per_row, self.node.others
        found: list[list[Tensor]] = [[header_OW[other]] for other in range(others)]
        for part in parts:
            for wave in range(waves):
                for other in range(others):
                    first = (wave * others + other) * rows
                    found[other].append(part[first : first + rows])
        return found

    def _find_failure(self) -> BywashError | None:
        limit_s = 2 * self._group.deadline_s
        if not self.wire.finished(limit_s):
            found = self._group.verdict(f"waiting for other hosts (waited {limit_s:g} s)")
            self.wire.abort()
            self.wire.finished(limit_s)
            return found
        words = self._words.tolist()
        if words[_EXPERT] != -1:
            return bad_expert("exchange across hosts", self.rank, words[_EXPERT] & 0xFFFFFFFFFFFFFFFF)
        if words[_TOKENS]:
            return ConfigError(
                f"exchange across hosts: rank {self.rank} was given {words[_TOKENS]} tokens on the device, more than "
                "its input has rows"
            )
        if words[_MISMATCH]:
            ranks = self._counterparts(words[_MISMATCH])
            return PlanMismatchError(
                f"rank {ranks[0]} planned this step differently (digest {words[_THEIRS]:#010x} there, "
                f"{int(self._digest) & 0xFFFFFFFF:#010x} on rank {self.rank}); no row was read. All ranks must run the "
                "same bywash with the same options",
                ranks,
            )
        if words[_TOLD]:
            ranks = self._counterparts(words[_TOLD])
            return ExchangeError(f"rank {ranks[0]} failed in this step and told rank {self.rank}; see its error", ranks)
        return self._of_inner(self.inner.failure())

    def _of_inner(self, error: BywashError | None) -> BywashError | None:
        """An error of the inner leg in terms of the job: who is late there may have waited for another host."""
        if error is None or not isinstance(error, ExchangeError):
            return error
        neighbours = self.hosts.neighbours(self.rank)
        ranks = [neighbours[local] for local in error.ranks]
        if isinstance(error, RankLostError):
            across = self._group.verdict(str(error))
            if isinstance(across, ExchangeError) and across.ranks:
                return across
        numbers = ", ".join(f"{local} is rank {rank}" for local, rank in enumerate(neighbours))
        return type(error)(f"inside a host ({numbers}): {error}", ranks)

    def _counterparts(self, mask: int) -> list[int]:
        """The ranks with this index on the hosts of a mask."""
        index = self.hosts.index_R[self.rank]
        return [ranks[index] for host, ranks in enumerate(self.hosts.members) if mask >> host & 1]
