"""`shm`: the exchange between CPU processes of one host, through memory that all of them map.

Every rank writes straight into its peers' heaps: rows with index, weights and counts in one message, outputs into slots
that the source owns, each behind one flag that says which step and which plan it belongs to. No step waits for more
than it reads: two generations of every buffer stand in for a leading barrier. docs/shm.md explains the protocol.

Shapes: T tokens, K experts per token, D hidden, R ranks, E experts, N rows received, M pairs computed here, S source
slots. `shm_layout` knows the addresses, `shm_endpoint` flags and waiting, `shm_watch` the blame, `link` the emulated
network, `shm_step` what a step is; this file the order of events in it.
"""

import ctypes
import time
from collections.abc import Callable
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bywash.balance import StepPlan
from bywash.errors import BywashError, ConfigError
from bywash.exchange.base import Exchange, Handle, Received
from bywash.exchange.group import Group
from bywash.exchange.link import Links
from bywash.exchange.mixed import add_mixed, mixed_outputs, mixed_rows_per_rank, outputs_per_row, read_ids, wire_ids
from bywash.exchange.names import Combine
from bywash.exchange.ordered_sum import OrderedSum
from bywash.exchange.rows import DTYPES, pairs_per_rank, send_lists, shape_text
from bywash.exchange.shm_endpoint import SIGNAL_BYTES, ShmEndpoint
from bywash.exchange.shm_layout import GENERATIONS, Header, Message, RowsHeap, RowsLayout, round_up_tokens
from bywash.exchange.shm_step import Step, check_outputs, pair_places, pair_slots, partial_slots
from bywash.routing import Routing


class ShmExchange(Exchange):
    """One-sided puts into symmetric heaps.

    Up to two steps may be in flight at once. `Received.rows_ND` lies in the heap and is valid until `combine_start`.
    """

    name = "shm"
    _sum: OrderedSum  # this and the next are made by the first step
    _small_sums: Tensor

    def __init__(
        self, group: Group, *, combine_mode: Combine = "exact", tokens: int = 0, link: Links | None = None
    ) -> None:
        """Prepare; the heaps are opened by the first step, when its shape is known.

        Args:
            group: the ranks, all on this host. Its `deadline_s` bounds every wait.
            combine_mode: see `Exchange`.
            tokens: the most tokens a rank is expected to bring to a step, to size the heap once. A larger step is
                no error: all ranks then open a larger heap.
            link: emulate a link between ranks (see `Link`); `emulated` then says so.

        Raises:
            ConfigError: ranks on several hosts, more than 64 ranks, or a machine without x86 store order.
        """
        super().__init__(rank=group.rank, ranks=group.ranks, combine_mode=combine_mode)
        self._end = ShmEndpoint(group, self.combine_mode, link)
        self.emulated = self._end.emulated
        self._tokens = tokens
        self._rows: RowsHeap | None = None
        self._shape: tuple[int, int, int] | None = None
        self._steps_begun = self._fetches_begun = 0
        self._slots: list[Tensor] = []
        self._in_flight: list[Step | None] = [None] * GENERATIONS

    def counts(self, counts_E: NDArray[np.int32]) -> NDArray[np.int32]:
        """See `Exchange.counts`."""
        self._end.open_control(counts_E.size)
        counts_RE = self._end.exchange_counts(counts_E)
        self.traffic.wire_bytes += (self.ranks - 1) * (8 * counts_E.size + SIGNAL_BYTES // 2)
        return counts_RE

    def dispatch_start(self, x_TD: Tensor, routing: Routing, plan: StepPlan) -> Handle:
        """See `Exchange.dispatch_start`. Rows go to fixed places, so neither counts nor sizes are waited for."""
        self._end.open_control(routing.num_experts)
        step = self._begin(x_TD, routing, plan)
        for peer in self._end.peers:
            self._send_rows(step, peer, Message.ROWS)
        self.traffic.logical_bytes += 2 * int(step.counts_E.sum()) * x_TD.shape[1] * x_TD.element_size()
        return Handle(routing=routing, plan=plan, state={"step": step})

    def dispatch_finish(self, handle: Handle) -> Received:
        """See `Exchange.dispatch_finish`."""
        handle.advance("dispatch_finish", "combine_start")
        step: Step = handle.state["step"]
        self._end.await_flags(Message.ROWS, step.number, "waiting for dispatched rows")
        self._end.check_plans(Message.ROWS, step.number, step.digest)
        headers_R = [self._header(step, source) for source in range(self.ranks)]
        most = max(header[Header.TOKENS] for header in headers_R)
        if not self._fits(step, most):
            self._send_again(step, most)
        step.source_slot_R = [header[Header.OUTPUT_SLOT] for header in headers_R]
        step.received = self._collect(step, [header[Header.ROWS] for header in headers_R])
        self.traffic.steps += 1
        return step.received

    def combine_start(self, handle: Handle, y_MD: Tensor) -> None:
        """See `Exchange.combine_start`."""
        step: Step = handle.state["step"]
        heap, received = step.heap, step.received
        assert heap is not None, "dispatch_finish opens it"
        assert received is not None, "dispatch_finish sets it"
        ids_NK = received.ids_NK.numpy()
        pairs_N = np.count_nonzero(ids_NK >= 0, axis=1).cumsum()
        check_outputs(step, y_MD, int(pairs_N[-1]) if pairs_N.size else 0)
        handle.advance("combine_start", "combine_finish")
        self._return_outputs(step, y_MD.detach(), pairs_N)

    def combine_finish(self, handle: Handle) -> Tensor:
        """See `Exchange.combine_finish`."""
        handle.advance("combine_finish", "done")
        step: Step = handle.state["step"]
        assert step.heap is not None, "dispatch_finish opens it"
        if step.mixed:
            return self._finish_mixed(handle, step)
        exact = self.combine_mode == "exact"
        # Where the terms of each token's sum will be: worked out before the wait, not after it.
        at_TJ = pair_slots(step) if exact else partial_slots(step)
        self._end.await_flags(Message.OUTPUTS, step.number, "waiting for outputs")
        out_TD = torch.empty(step.x_TD.shape, dtype=step.x_TD.dtype)
        weights_TK = step.weights_TK.numpy() if exact else None
        self._sum(step.heap.outputs[self.rank][step.generation], at_TJ, weights_TK, out_TD)
        self._in_flight[step.generation] = None
        handle.state.clear()
        return out_TD

    def _finish_mixed(self, handle: Handle, step: Step) -> Tensor:
        assert step.heap is not None, "dispatch_finish opens it"
        self._end.await_flags(Message.OUTPUTS, step.number, "waiting for outputs")
        outputs_PD = step.heap.outputs[self.rank][step.generation]
        out_TD = add_mixed(outputs_PD, step.lists, step.output_slot_R, step.ids_TK, step.weights_TK, step.plan)
        self._in_flight[step.generation] = None
        handle.state.clear()
        return out_TD

    def open_slots(self, slots: int, slot_bytes: int) -> Tensor:
        """See `Exchange.open_slots`. They lie in a heap of their own, for the weights' homes to write into."""
        self._slots = self._end.open_slots(slots, slot_bytes)
        return self._slots[self.rank]

    def fetch(self, donor_RS: NDArray[np.int32], digest: int, read: Callable[[int, int], Tensor]) -> None:
        """See `Exchange.fetch`. Donors put; every rank tells every other when it has put all that it had to."""
        number = self._fetches_begun
        self._fetches_begun += 1
        for peer in self._end.peers:
            begun_ns, size = time.monotonic_ns(), 0
            for slot in np.flatnonzero(donor_RS[peer] == self.rank).tolist():
                self._slots[peer][slot].copy_(read(peer, slot))
                size += self._slots[peer].shape[1]
            self._end.signal(Message.WEIGHTS, number, digest, peer, size, begun_ns)
            self.traffic.weight_bytes += size
        self._end.await_flags(Message.WEIGHTS, number, "waiting for weights")
        self._end.check_plans(Message.WEIGHTS, number, digest)

    def refuse(self, plan: StepPlan, error: BywashError) -> NoReturn:
        """See `Exchange.refuse`. Ends the exchange on every rank."""
        self._end.open_control(plan.rank_E.size)
        self._end.fail(error)

    def close(self) -> None:
        """See `Exchange.close`. The heaps go with the last view of them; the group stays open."""
        self._end.close()
        self._rows = None
        self._slots = []
        self._in_flight = [None] * GENERATIONS

    def _begin(self, x_TD: Tensor, routing: Routing, plan: StepPlan) -> Step:
        """Check the step against the exchange, and work out who gets what."""
        self._check_step(x_TD, routing, plan)
        mixed = self.combine_mode == "stable" and plan.spilled > 0
        lists = send_lists(routing, plan, source=self.rank, mixed=mixed)
        sizes = [sent.tokens_N.numel() for sent in lists]
        if mixed or self.combine_mode == "exact":
            sizes = mixed_rows_per_rank(lists) if mixed else pairs_per_rank(lists)
        step = Step(
            number=self._steps_begun,
            generation=self._steps_begun % GENERATIONS,
            digest=plan.digest,
            x_TD=x_TD.detach(),
            weights_TK=routing.weights_TK.detach(),
            lists=lists,
            counts_E=routing.counts_E().numpy().astype(np.uint64),
            output_slot_R=[sum(sizes[:rank]) for rank in range(self.ranks)],
            heap=self._rows,
            plan=plan,
            ids_TK=routing.ids_TK,
            mixed=mixed,
        )
        self._steps_begun += 1
        self._in_flight[step.generation] = step
        return step

    def _check_step(self, x_TD: Tensor, routing: Routing, plan: StepPlan) -> None:
        """Refuse what does not fit this exchange; the first step says what does."""
        if plan.rows_R.size != self.ranks or plan.rank_E.size != routing.num_experts:
            raise ConfigError(
                f"exchange shm: a plan for {plan.rows_R.size} ranks and {plan.rank_E.size} experts; this step has "
                f"{self.ranks} and {routing.num_experts}"
            )
        if x_TD.dtype not in DTYPES or x_TD.device.type != "cpu":
            raise ConfigError(f"exchange shm: rows are {x_TD.dtype} on {x_TD.device}, not {DTYPES} on cpu")
        if x_TD.dim() != 2 or x_TD.shape[0] != routing.tokens:
            raise ConfigError(f"exchange shm: rows {list(x_TD.shape)} for {routing.tokens} routed tokens")
        before = self._in_flight[self._steps_begun % GENERATIONS]
        if before is not None:
            raise ConfigError(
                f"exchange shm: {GENERATIONS} steps are in flight; finish the combine of step {before.number} first"
            )
        shape = (x_TD.shape[1], routing.top_k, DTYPES.index(x_TD.dtype))
        if self._shape is None:
            self._shape, self._sum = shape, OrderedSum(x_TD.shape[1], x_TD.dtype)
            with torch.inference_mode(False):  # outlives the model's inference mode
                self._small_sums = torch.empty(self._sum.block, x_TD.shape[1], dtype=x_TD.dtype)
        if shape != self._shape:
            raise ConfigError(
                f"exchange shm: {shape_text(shape)}; the exchange was opened by a step with "
                f"{shape_text(self._shape)}; layers that differ need an exchange each"
            )

    def _send_rows(self, step: Step, peer: int, message: Message) -> None:
        """Put this rank's rows for `peer` into its heap, then counts and header, then the flag.

        A step that is larger than the heap sends its header alone; every rank sees that and opens a larger one.
        """
        begun_ns = time.monotonic_ns()
        sent, control, size = step.lists[peer], self._end.control, 0
        rows = sent.tokens_N.numel()
        if step.heap is not None and self._fits(step, step.x_TD.shape[0]):
            heap, generation = step.heap, step.generation
            place = slice(self.rank * heap.layout.tokens, self.rank * heap.layout.tokens + rows)
            torch.index_select(step.x_TD, 0, sent.tokens_N, out=heap.rows[peer][generation][place])
            heap.ids[peer][generation][place].copy_(wire_ids(sent, step.counts_E.size))
            heap.weights[peer][generation][place].copy_(sent.weights_NK)
            size = rows * (heap.layout.row_bytes + 8 * heap.layout.top_k)
            self.traffic.rows_sent += rows
        control.arrays[peer][control.layout.step_counts(step.generation, self.rank)] = step.counts_E
        words, at = control.words[peer], control.layout.header(step.generation, self.rank)
        for word, value in enumerate(self._own_header(step, peer)):
            words[at + word] = value
        size += Header.WIDTH * 8 + step.counts_E.nbytes
        self.traffic.wire_bytes += self._end.signal(message, step.number, step.digest, peer, size, begun_ns)

    def _send_again(self, step: Step, tokens: int) -> None:
        """Open a heap for `tokens` and send the step once more. All ranks saw the same headers, so all come here."""
        step.heap = self._rows
        if not self._fits(step, tokens):
            hidden, top_k, dtype = step.shape
            before = self._rows.layout if self._rows is not None else None
            outputs = max(self._outputs_per_token(step), before.outputs_per_token if before else 0)
            self._rows = self._end.open_rows(
                RowsLayout(
                    ranks=self.ranks,
                    tokens=round_up_tokens(max(tokens, self._tokens, before.tokens if before else 0)),
                    hidden=hidden,
                    top_k=top_k,
                    dtype=DTYPES[dtype],
                    outputs_per_token=outputs,
                )
            )
        step.heap = self._rows
        for peer in self._end.peers:
            self._send_rows(step, peer, Message.ROWS_AGAIN)
        self._end.await_flags(Message.ROWS_AGAIN, step.number, "waiting for rows sent again into a larger heap")

    def _outputs_per_token(self, step: Step) -> int:
        """Output slots that each token of a source may need: one for each output that travels."""
        top_k = step.shape[1]
        return top_k if step.mixed or self.combine_mode == "exact" else min(self.ranks, top_k)

    def _fits(self, step: Step, tokens: int) -> bool:
        """Whether the step's heap has room for sources of `tokens` tokens. Every rank finds the same for the most."""
        layout = step.heap.layout if step.heap is not None else None
        return (
            layout is not None and layout.tokens >= tokens and layout.outputs_per_token >= self._outputs_per_token(step)
        )

    def _own_header(self, step: Step, peer: int) -> list[int]:
        """What `peer` is told, in the order of `Header`."""
        return [step.x_TD.shape[0], step.lists[peer].tokens_N.numel(), step.output_slot_R[peer], *step.shape]

    def _header(self, step: Step, source: int) -> list[int]:
        """What `source` has told this rank, checked against this rank's shapes."""
        if source == self.rank:
            return self._own_header(step, source)
        at = self._end.control.layout.header(step.generation, source)
        header = self._end.control.words[self.rank][at : at + Header.WIDTH].tolist()
        shape = (header[Header.HIDDEN], header[Header.TOP_K], header[Header.DTYPE])
        if shape != step.shape:
            theirs, ours = shape_text(shape), shape_text(step.shape)
            self._end.fail(ConfigError(f"rank {source} sends rows of {theirs}; rank {self.rank} has {ours}"))
        return header

    def _collect(self, step: Step, rows_from_R: list[int]) -> Received:
        """Close the gaps between the sources' rows, in place, and add this rank's own."""
        assert step.heap is not None
        heap, generation, me, own = step.heap, step.generation, self.rank, step.lists[self.rank]
        rows_PD, room, row_bytes = heap.rows[me][generation], heap.layout.tokens, heap.layout.row_bytes
        # Rank 0's own rows end where rank 1's begin, so that with two ranks nothing has to move.
        start = at = room - rows_from_R[0] if me == 0 and self.ranks > 1 else 0
        for source, rows in enumerate(rows_from_R):
            if source == me:
                torch.index_select(step.x_TD, 0, own.tokens_N, out=rows_PD[at : at + rows])
            elif at != source * room:
                address = rows_PD.data_ptr()
                ctypes.memmove(address + at * row_bytes, address + source * room * row_bytes, rows * row_bytes)
            at += rows
        ids, weights = heap.ids[me][generation], heap.weights[me][generation]
        places = [slice(source * room, source * room + rows) for source, rows in enumerate(rows_from_R)]
        control, experts = self._end.control, step.counts_E.size
        counts = control.arrays[me]
        counts[control.layout.step_counts(generation, me)] = step.counts_E
        own_ids_NK = wire_ids(own, experts)
        ids_NK = torch.cat([own_ids_NK if r == me else ids[place].long() for r, place in enumerate(places)])
        if step.mixed:
            ids_NK, step.alone_NK = read_ids(ids_NK, experts)
        return Received(
            rows_ND=rows_PD[start:at],
            ids_NK=ids_NK,
            weights_NK=torch.cat([own.weights_NK if r == me else weights[place] for r, place in enumerate(places)]),
            rows_from_R=rows_from_R,
            counts_RE=counts[control.layout.step_counts_of_all(generation)].reshape(self.ranks, -1).astype(np.int32),
        )

    def _return_outputs(self, step: Step, y_MD: Tensor, pairs_N: NDArray[np.int64]) -> None:
        """Put each source's outputs into its slots: all k or their sums. `pairs_N`: pairs up to each row."""
        heap, received = step.heap, step.received
        assert heap is not None, "dispatch_finish opens it"
        assert received is not None, "dispatch_finish sets it"
        ends_R = np.cumsum([0, *received.rows_from_R])
        ready: Tensor | None = y_MD
        if self.combine_mode == "exact":
            ends_R = np.append(0, pairs_N)[ends_R]
        elif step.alone_NK is not None:
            ends_R = np.append(0, outputs_per_row(received.ids_NK, step.alone_NK).cumsum())[ends_R]
            ready = mixed_outputs(y_MD, received.ids_NK, step.alone_NK, received.weights_NK)
        else:
            at_NK, weights_NK = pair_places(received.ids_NK.numpy()), received.weights_NK.numpy()
            ready = self._sum_if_small(y_MD, at_NK, weights_NK)
        for source in (*self._end.peers, self.rank):
            begun_ns = time.monotonic_ns()
            part = slice(ends_R[source].item(), ends_R[source + 1].item())
            sent, slot = part.stop - part.start, step.source_slot_R[source]
            slots_D = heap.outputs[source][step.generation][slot : slot + sent]
            if ready is not None:
                slots_D.copy_(ready[part])
            else:
                self._sum(y_MD, at_NK[part], weights_NK[part], slots_D)
            if source != self.rank:
                size = sent * heap.layout.row_bytes
                signal = self._end.signal(Message.OUTPUTS, step.number, step.digest, source, size, begun_ns)
                self.traffic.wire_bytes += signal
                self.traffic.rows_returned += sent

    def _sum_if_small(self, y_MD: Tensor, at_NK: NDArray[np.int64], weights_NK: NDArray[np.float32]) -> Tensor | None:
        """All sums at once where they fit into one block: in decode the calls cost more than the copy afterwards."""
        if at_NK.shape[0] > self._small_sums.shape[0]:
            return None
        sums_ND = self._small_sums[: at_NK.shape[0]]
        self._sum(y_MD, at_NK, weights_NK, sums_ND)
        return sums_ND
