"""What a candidate costs: stages, exchange, overlap, overflow and memory of both phases, put together.

A candidate is a group of hosts with every choice made. `GroupCost.of` prepares what does not depend on the batch
(placement, traffic, slopes), `price` answers for one batch in closed form, so that a search can ask often; with a
simulated exchange in place of the bound the same arithmetic gives the final figures. Deterministic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from bywash.balance.placement import Placement
from bywash.moe.pipeline.order import build_schedule
from bywash.moe.pipeline.schedule import SERIAL, Kind, LayerForm, Split
from bywash.moe.pipeline.simulate import Usage, simulate, usage
from bywash.planner import compute
from bywash.planner.candidate import Binding, Candidate, Outcome, PhaseCost, Problem
from bywash.planner.figures import Figure
from bywash.planner.group import Group, IntArray, experts_per_rank, placements, shares_R, speeds_R
from bywash.planner.ledger import Fill, Ledger, make_ledger, most_experts
from bywash.planner.model import ModelShape
from bywash.planner.network import Sending
from bywash.planner.overflow import Loads, SlotRule, home_loads, slot_loads
from bywash.planner.target import Workload
from bywash.planner.traffic import Traffic, Way, group_traffic
from bywash.planner.wire import Exchange, exchange_lines

LAYERS_SIMULATED = 4
REFERENCE_TOKENS = 16_384
"""Of a reference step, over all ranks: traffic is counted on it once, and linear in tokens from there."""
SPLITS = (SERIAL, Split(lanes=2), Split(chunks=2), Split(chunks=4))
SHARED_SPLIT = Split()
"""In one piece, dispatch and combine behind the two halves of a shared expert."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupCost:
    """A group, prepared: everything that does not depend on the batch."""

    problem: Problem
    group: Group
    way: Way
    balanced: bool
    speeds: IntArray
    own_R: IntArray | None
    most_R: IntArray
    homes: tuple[Placement, ...]
    traffic: Traffic | None
    exchange: Exchange | None
    prefill_exchange: Exchange | None = None
    """Where prefill's was simulated apart; else it is the same line as decode's."""
    _known: dict[tuple[str, int, SlotRule], PhaseCost] = field(default_factory=dict)

    @classmethod
    def of(cls, problem: Problem, group: Group, way: Way) -> "GroupCost":
        """Place experts and count rows; without room for the experts there is neither."""
        model, sample = problem.model, problem.sample
        balanced = sample.recorded is not None
        speeds = speeds_R(group, model, problem.workload)
        most_R = _most_experts(problem, group)
        own_R = experts_per_rank(model.experts, speeds, most_R)
        homes: tuple[Placement, ...] = ()
        traffic, exchange = None, None
        if own_R is not None:
            counts = sample.counts_LE if balanced else None
            homes = placements(counts, own_R, sample.ids_NLK.shape[1], model.experts)
            choices = sample.choices(shares_R(max(REFERENCE_TOKENS, group.ranks), speeds))
            traffic = group_traffic(group, choices, homes, way, problem.ports)
            exchange = exchange_lines(model, group, traffic, problem.network, problem.starts)
        return cls(
            problem=problem,
            group=group,
            way=way,
            balanced=balanced,
            speeds=speeds,
            own_R=own_R,
            most_R=most_R,
            homes=homes,
            traffic=traffic,
            exchange=exchange,
        )

    def price(self, sequences: int, rule: SlotRule | None = None, sending: Sending | None = None) -> Outcome:
        """One batch: `sequences` for each device on average."""
        candidate = Candidate(
            group=self.group,
            way=self.way,
            sequences=sequences,
            rule=rule or SlotRule(),
            balanced=self.balanced,
            sending=sending,
        )
        ledgers, memory = self._memory(candidate)
        if self.traffic is None or self.exchange is None or memory:
            return Outcome(
                candidate=candidate,
                decode=None,
                prefill=None,
                ledgers=ledgers,
                tokens_per_s=0.0,
                tpot_ms=float("inf"),
                ttft_ms=float("inf"),
                binding=memory,
                arithmetic="",
            )
        work = self.problem.workload
        decode = self._phase("decode", sequences, float(work.context), candidate.rule)
        prefill = self._phase("prefill", work.chunk_tokens, _prefill_context(work), candidate.rule)
        return self._outcome(candidate, decode, prefill, ledgers)

    def tokens_of(self, phase: str, sequences: int) -> int:
        """Tokens of a step over all ranks."""
        return self.group.ranks * (sequences if phase == "decode" else self.problem.workload.chunk_tokens)

    def _memory(self, candidate: Candidate) -> tuple[tuple[Ledger, ...], tuple[Binding, ...]]:
        group, model = self.group, self.problem.model
        if self.own_R is None:
            short = Binding(
                name=f"memory for experts on {group.describe()}",
                need=float(model.experts),
                have=float(self.most_R.sum()),
                unit="experts of each layer",
            )
            return (), (short,)
        ledgers, bindings = [], []
        for device in dict.fromkeys(group.device_R):
            ledger = self._ledger(candidate, device.name)
            ledgers.append(ledger)
            if ledger.free_bytes < 0:
                bindings.append(
                    Binding(
                        name=f"memory of {device.name}",
                        need=ledger.need_bytes / 1e9,
                        have=ledger.have_bytes / 1e9,
                        unit="GB",
                    )
                )
        return tuple(ledgers), tuple(sorted(bindings, key=lambda one: -one.excess))

    def _ledger(self, candidate: Candidate, device: str) -> Ledger:
        """Of the fullest rank with such a device."""
        assert self.own_R is not None
        names = np.array([one.name for one in self.group.device_R])
        at = int(np.flatnonzero(names == device)[0])
        share = float(self.speeds[at]) / float(self.speeds.mean())
        own = int(self.own_R[names == device].max())
        fill = _fill(self.problem, self.group, -(-int(candidate.sequences * share * 1024) // 1024), share)
        rule = candidate.rule
        fill = replace(fill, experts=own, slots=rule.slots, capacity_factor=rule.capacity_factor)
        return make_ledger(self.problem.model, self.group.device_R[at], fill)

    def _phase(self, name: str, tokens: int, context: float, rule: SlotRule) -> PhaseCost:
        key = (name, tokens, rule)  # prefill is the same for every batch
        if key not in self._known:
            self._known[key] = self._fresh_phase(name, tokens, context, rule)
        return self._known[key]

    def _fresh_phase(self, name: str, tokens: int, context: float, rule: SlotRule) -> PhaseCost:
        assert self.traffic is not None
        assert self.exchange is not None
        total = tokens * self.group.ranks
        home, planned = self._loads(total, rule)
        fetch_us = self._fetch_us(planned, total)
        splits = self._splits(rule)
        options, best = [], None
        for split in splits:
            stages = self._stages(name, tokens, context, planned, split)
            layer_us, used = _pipeline(stages, split, self.problem.model)
            layer_us += fetch_us
            step_ms = self._step_ms(layer_us, name, tokens, context)
            options.append((str(split), step_ms))
            if best is None or step_ms < best[0]:
                best = (step_ms, split, used, layer_us, stages)
        assert best is not None
        return PhaseCost(
            name=name,
            tokens=total,
            stages=self._stages(name, tokens, context, planned, SERIAL),
            options=tuple(options),
            split=best[1],
            usage=best[2],
            layer_us=best[3],
            split_stages=best[4],
            step_ms=best[0],
            imbalance_home=float(np.mean([one.imbalance(self.speeds) for one in home])),
            imbalance=float(np.mean([one.imbalance(self.speeds) for one in planned])),
            rows_LR=np.stack([one.rows_R for one in planned]),
            home_rows_LR=np.stack([one.rows_R for one in home]),
            fetch_us=fetch_us,
        )

    def _splits(self, rule: SlotRule) -> tuple[Split, ...]:
        """What the runtime can do: slots and overlap exclude each other, and CPU ranks move rows themselves."""
        if rule.slots or self.group.device_R[0].is_cpu:
            return (SERIAL,)
        return (*SPLITS, SHARED_SPLIT) if self.problem.model.shared_intermediate else SPLITS

    def _loads(self, total: int, rule: SlotRule) -> tuple[list[Loads], list[Loads]]:
        assert self.traffic is not None
        ranks, reference = self.group.ranks, self.traffic.tokens
        home = [home_loads(layer, ranks, total, reference) for layer in self.traffic.layers]
        if not rule.slots:
            return home, home
        return home, [slot_loads(self.traffic, layer, total, rule, self.speeds) for layer in self.traffic.layers]

    def _fetch_us(self, planned: Sequence[Loads], total: int) -> float:
        """Copied weights, over the slowest way that there is, as far as the experts' work at home does not hide it."""
        rate = self.group.copy_gbytes_per_s
        took = []
        for one in planned:
            copy_us = float(one.fetches_R.max()) * self.problem.model.expert_bytes / rate * 1e-3
            work_us = compute.experts(self.problem.model, self.group, one.rows_R, one.active_R).us
            took.append(max(0.0, copy_us - work_us))
        return float(np.mean(took))

    def _stages(
        self, name: str, tokens: int, context: float, planned: Sequence[Loads], split: Split
    ) -> dict[Kind, Figure]:
        """One op of each kind, of a lane or of one of its chunks; the slowest rank of each."""
        exchange = self.prefill_exchange if name == "prefill" and self.prefill_exchange is not None else self.exchange
        assert exchange is not None
        model, group = self.problem.model, self.group
        lane, part = 1 / split.lanes, 1 / (split.lanes * split.chunks)
        total = tokens * group.ranks
        slow = self._slowest(name, tokens * lane, context)
        experts = [compute.experts(model, group, one.rows_R * part, _active(one, part)) for one in planned]
        us = float(np.mean([one.us for one in experts]))
        return slow | {
            Kind.EXPERTS: replace(
                experts[0], us=us, arithmetic=f"mean of {len(experts)} layers, first: {experts[0].arithmetic}"
            ),
            Kind.DISPATCH: exchange.dispatch.figure(total * part),
            Kind.COMBINE: exchange.combine.figure(total * part),
        }

    def _slowest(self, name: str, tokens: float, context: float) -> dict[Kind, Figure]:
        """Stages outside the experts, each on the kind of device that takes longest with its share of the tokens."""
        model, group = self.problem.model, self.group
        found: dict[Kind, Figure] = {}
        for device, speed in dict.fromkeys(zip(group.device_R, self.speeds.tolist())):
            work = compute.Work(
                tokens=tokens * speed / float(self.speeds.mean()), context=context, decode=name == "decode"
            )
            stages = {
                Kind.ATTENTION: compute.attention(model, device, work, group.tp),
                Kind.ROUTE: compute.route(model, device, work),
                Kind.FINISH: compute.finish(model, device, work),
            }
            if model.shared_intermediate:
                stages[Kind.SHARED] = compute.shared(model, device, work)
            for kind, figure in stages.items():
                if kind not in found or figure.us > found[kind].us:
                    found[kind] = figure
        return found

    def _step_ms(self, layer_us: float, name: str, tokens: int, context: float) -> float:
        """All layers, dense ones and the output matrix included."""
        model, group = self.problem.model, self.group
        rest = 0.0
        for device, speed in dict.fromkeys(zip(group.device_R, self.speeds.tolist())):
            work = compute.Work(
                tokens=tokens * speed / float(self.speeds.mean()), context=context, decode=name == "decode"
            )
            extra = compute.head(model, device, work, group.tp).us
            if model.dense_layers:
                one = compute.attention(model, device, work, group.tp).us + compute.dense(model, device, work).us
                extra += model.dense_layers * one
            rest = max(rest, extra)
        return (model.moe_layers * layer_us + rest) / 1e3

    def _outcome(
        self, candidate: Candidate, decode: PhaseCost, prefill: PhaseCost, ledgers: tuple[Ledger, ...]
    ) -> Outcome:
        work, target = self.problem.workload, self.problem.target
        chunk, ranks = work.chunk_tokens, self.group.ranks
        per_prompt_ms = work.prompt_tokens * prefill.step_ms / chunk
        per_output_ms = work.output_tokens * decode.step_ms / candidate.sequences
        rate = ranks * work.output_tokens / (per_prompt_ms + per_output_ms) * 1e3
        ttft = -(-work.prompt_tokens // chunk) * prefill.step_ms
        asked = (
            ("time between tokens", decode.step_ms, target.tpot_ms),
            ("time to first token", ttft, target.ttft_ms),
            ("prefill step", prefill.step_ms, target.step_ms),
        )
        broken = [
            Binding(name=name, need=got, have=bound, unit="ms")
            for name, got, bound in asked
            if bound is not None and got > bound
        ]
        return Outcome(
            candidate=candidate,
            decode=decode,
            prefill=prefill,
            ledgers=ledgers,
            tokens_per_s=rate,
            tpot_ms=decode.step_ms,
            ttft_ms=ttft,
            binding=tuple(sorted(broken, key=lambda one: -one.excess)),
            arithmetic=(
                f"{ranks} devices x {work.output_tokens} tokens / ({work.prompt_tokens} prompt tokens x "
                f"{prefill.step_ms:.2f} ms / {chunk} + {work.output_tokens} x {decode.step_ms:.2f} ms / "
                f"{candidate.sequences}) = {rate:,.0f} tokens/s"
            ),
        )


def _active(loads: Loads, part: float) -> NDArray[np.float64]:
    """Experts that a part of the tokens meets, given those that all meet: as many, while there are rows enough."""
    mean_R = np.divide(loads.rows_R, loads.active_R, out=np.zeros_like(loads.rows_R), where=loads.active_R > 0)
    return np.asarray(loads.active_R * -np.expm1(-mean_R * part))


def op_costs_ns(stages_us: Mapping[Kind, float], split: Split) -> dict[Kind, int]:
    """Stage times as a schedule wants them; a step in one piece has its shared expert in two, two matrices and one."""
    cost = {kind: round(us * 1e3) for kind, us in stages_us.items()}
    if split.whole and Kind.SHARED in cost:
        cost |= {Kind.SHARED_UP: cost[Kind.SHARED] * 2 // 3, Kind.SHARED_DOWN: cost[Kind.SHARED] // 3}
    return cost


def _pipeline(stages: dict[Kind, Figure], split: Split, model: ModelShape) -> tuple[float, Usage]:
    """A layer's time in a run of several, by the pipeline's own order."""
    cost = op_costs_ns({kind: figure.us for kind, figure in stages.items()}, split)
    if not split.overlapped:
        sent = cost[Kind.DISPATCH] + cost[Kind.COMBINE]
        step = sum(cost.values())
        serial = Usage(step_ns=step, compute_ns=step - sent, communication_ns=sent, exposed_ns=sent)
        return step / 1e3, serial
    form = LayerForm(shared=model.shared_intermediate > 0)
    schedule = build_schedule([form] * LAYERS_SIMULATED, split, cost=lambda kind, lane: cost[kind])
    used = usage(simulate(schedule, lambda op: cost[op.kind]))
    return used.step_ns / LAYERS_SIMULATED / 1e3, used


def _prefill_context(work: Workload) -> float:
    """Cached tokens that a prompt's token attends to, on average."""
    return work.prompt_tokens / 2


def _fill(problem: Problem, group: Group, sequences: int, share: float = 1.0) -> Fill:
    work, hosts = problem.workload, len(group.members)
    ranks = group.ranks
    missed = (1 - 1 / ranks) ** problem.model.top_k
    return Fill(
        ranks=ranks,
        hosts=hosts,
        tp=group.tp,
        experts=0,
        tokens=max(round(work.chunk_tokens * share), sequences),
        sequences=sequences,
        context=work.prompt_tokens + work.output_tokens,
        slots=0,
        capacity_factor=0.0,
        reached=(ranks - 1) * (1 - missed),
    )


def _most_experts(problem: Problem, group: Group) -> IntArray:
    """Experts of each layer that fit on each rank beside one sequence."""
    fill = _fill(problem, group, 1)
    most = {device: most_experts(problem.model, device, fill) for device in set(group.device_R)}
    return np.array([most[device] for device in group.device_R], np.int64)
