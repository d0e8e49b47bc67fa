"""What rank processes run in the tests of the `shm` exchange. Inputs come from seeds, so any process can check them."""

import os
import time

import numpy as np
import torch

from bywash.balance import Placement, plan_step
from bywash.exchange.shm import ShmExchange
from bywash.exchange.shm_endpoint import ShmEndpoint
from bywash.exchange.shm_layout import Message
from bywash.routing import Routing


def step_input(rank, step, *, tokens, hidden, experts, top_k, dtype=torch.float32):
    """(x_TD, routing): small integers, so that any order of summing is exact; each (rank, step) differs."""
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    x = torch.randint(-8, 9, (tokens, hidden), generator=generator).to(dtype)
    ids = torch.rand(tokens, experts, generator=generator).topk(top_k).indices
    ids[torch.rand(tokens, top_k, generator=generator) < 0.1] = -1
    weights = torch.randint(1, 4, (tokens, top_k), generator=generator).float()
    return x, Routing(ids_TK=ids, weights_TK=weights, num_experts=experts)


def run_expert(rows_MD, ids_M):
    """Expert e turns x into (e + 1) x: cheap, exact in integers, and different for each expert."""
    return rows_MD * (ids_M + 1).to(rows_MD.dtype).unsqueeze(1)


def outputs_of(received):
    rows, ks = (received.ids_NK >= 0).nonzero(as_tuple=True)
    return run_expert(received.rows_ND[rows], received.ids_NK[rows, ks])


def expected(x_TD, routing):
    factor_T = ((routing.ids_TK + 1) * routing.weights_TK * (routing.ids_TK >= 0)).sum(dim=1)
    return x_TD * factor_T.unsqueeze(1).to(x_TD.dtype)


def counts_of(routing):
    return routing.counts_E().numpy().astype(np.int32)


class Poisoned(ShmExchange):
    """Makes stale data visible: fills whatever may be written next with NaN, at the last moment when that is allowed.

    Peers write this rank's outputs only after its rows of the step, and its next rows of this generation only after
    its outputs of the step.
    """

    def dispatch_start(self, x_TD, routing, plan):
        if self._rows is not None:
            self._rows.outputs[self.rank][self._steps_begun % 2].fill_(float("nan"))
        return super().dispatch_start(x_TD, routing, plan)

    def combine_start(self, handle, y_MD):
        step = handle.state["step"]
        own = step.heap
        own.rows[self.rank][step.generation].fill_(float("nan"))
        own.ids[self.rank][step.generation].fill_(-1)
        own.weights[self.rank][step.generation].fill_(float("nan"))
        super().combine_start(handle, y_MD)


class Jittery(Poisoned):
    """Sleeps at random between the steps of the protocol, sometimes long enough for a peer to run far ahead."""

    def __init__(self, group, *, seed, **options):
        super().__init__(group, **options)
        self._dice = np.random.default_rng(seed * 64 + group.rank)
        signal = self._end.signal

        def late_signal(*args):
            self._pause()  # between the rows and their flag
            return signal(*args)

        self._end.signal = late_signal

    def _pause(self):
        dice = self._dice.random()
        if dice < 0.02:
            time.sleep(self._dice.random() * 1e-3)
        elif dice < 0.2:
            os.sched_yield()

    def _send_rows(self, step, peer, message):
        self._pause()
        super()._send_rows(step, peer, message)

    def _collect(self, step, rows_from_R):
        self._pause()
        return super()._collect(step, rows_from_R)

    def combine_start(self, handle, y_MD):
        self._pause()
        super().combine_start(handle, y_MD)

    def combine_finish(self, handle):
        self._pause()
        return super().combine_finish(handle)


SOUND_STEPS = 50
"""Steps of a seeded run before the bug sets in: by then every buffer holds data of an earlier step."""


def seed_missing_wait(message):
    """Make endpoints not wait for one kind of message, nor look at its plan, so that only the data can show it."""
    await_flags, check_plans = ShmEndpoint.await_flags, ShmEndpoint.check_plans
    await_counts = ShmEndpoint._await_counts

    def await_some(self, kind, step, during):
        if kind != message or step < SOUND_STEPS:
            await_flags(self, kind, step, during)

    def check_some(self, kind, step, digest):
        if kind != message or step < SOUND_STEPS:
            check_plans(self, kind, step, digest)

    def await_some_counts(self, cells_RE, generation, epoch):
        if message != Message.COUNTS or epoch < SOUND_STEPS:
            await_counts(self, cells_RE, generation, epoch)

    ShmEndpoint.await_flags, ShmEndpoint.check_plans = await_some, check_some
    ShmEndpoint._await_counts = await_some_counts


def soak(group, steps, ranks_seed, mode, in_flight, skip=None):
    """Run `steps` steps with random pauses; return the number of the first wrong one, or None.

    With two in flight, a step's combine comes after the next step's dispatch. `skip` names a message that is not
    waited for (the process is spoilt by it: use a pool of its own).
    """
    if skip is not None:
        seed_missing_wait(Message[skip])
    exchange = Jittery(group, combine_mode=mode, seed=ranks_seed)
    shape = {"hidden": 12, "experts": 6, "top_k": 3}
    placement = Placement.equal(shape["experts"], group.ranks)
    sizes = np.random.default_rng(ranks_seed)  # the same on all ranks
    wrong, open_steps, plan = None, [], None
    try:
        for number in range(steps):
            tokens_R = sizes.integers(0, 7, group.ranks)
            reuse = plan is not None and bool(sizes.integers(0, 2))
            x, routing = step_input(group.rank, number, tokens=int(tokens_R[group.rank]), **shape)
            if not reuse:
                counts_RE = exchange.counts(counts_of(routing))
                true_RE = [counts_of(step_input(r, number, tokens=int(t), **shape)[1]) for r, t in enumerate(tokens_R)]
                if wrong is None and not np.array_equal(counts_RE, true_RE):
                    wrong = number
                plan = plan_step(np.array(true_RE), placement)
            handle = exchange.dispatch_start(x, routing, plan)
            open_steps.append((number, handle, x, routing))
            if len(open_steps) == in_flight:
                wrong = _finish(exchange, open_steps.pop(0), wrong)
        while open_steps:
            wrong = _finish(exchange, open_steps.pop(0), wrong)
    finally:
        exchange.close()
    return wrong


def _finish(exchange, open_step, wrong):
    number, handle, x, routing = open_step
    received = exchange.dispatch_finish(handle)
    exchange.combine_start(handle, outputs_of(received))
    out = exchange.combine_finish(handle)
    if wrong is None and not torch.equal(out, expected(x, routing)):
        return number
    return wrong
