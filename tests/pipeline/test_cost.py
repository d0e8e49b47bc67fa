"""The decision between one micro-batch, several and chunks."""

from dataclasses import replace

import pytest

from bywash.errors import ConfigError
from bywash.moe.pipeline import MODES, SERIAL, Kind, Load, Split, decide, splits_of
from bywash.moe.pipeline.cost import H200_NVLINK, cpu_rank

BIG = Load(
    ranks=2,
    tokens=4096,
    hidden=7168,
    item_bytes=2,
    top_k=8,
    experts=256,
    combine="stable",
    intermediate=2048,
    attention_weights=100_000_000,
)
SLOW = replace(H200_NVLINK, link_gbytes_per_s=24.0)


def test_two_micro_batches_lose_where_experts_wait_for_their_weights():
    """Experts of 4,096 tokens and 256 experts on two H200: measured 4.84 ms in one piece, 6.12 in two, 11.2 in four."""
    decision = decide(BIG, H200_NVLINK, splits_of("auto", 2))
    assert decision.split == SERIAL
    serial, halves, _, quarters = decision.candidates  # the third: two chunks
    assert serial.stages_ns[Kind.EXPERTS] / 1e6 == pytest.approx(4.84, rel=0.03)
    assert halves.stages_ns[Kind.EXPERTS] / 1e6 == pytest.approx(6.12, rel=0.03)
    assert quarters.stages_ns[Kind.EXPERTS] / 1e6 == pytest.approx(11.2, rel=0.03)
    assert "experts 4.85 -> 6.21 ms" in decision.why


@pytest.mark.parametrize(
    ("load", "machine"),
    [(replace(BIG, experts=64, tokens=8192), H200_NVLINK), (replace(BIG, experts=64), SLOW), (BIG, SLOW)],
    ids=["more tokens, fewer experts", "slow link, fewer experts", "slow link"],
)
def test_micro_batches_win_elsewhere(load, machine):
    decision = decide(load, machine, splits_of("auto", 4))
    assert decision.split.lanes > 1
    assert decision.candidates[0].usage.step_ns > min(c.usage.step_ns for c in decision.candidates)
    assert str(decision.split) in decision.why


def test_a_shared_expert_is_enough_to_hide_behind():
    """On NVLink both halves of the exchange take less than a shared expert's products; splitting would cost tails."""
    load = replace(BIG, experts=64, tokens=8192, shared_intermediate=2048, passes=True)
    decision = decide(load, H200_NVLINK, splits_of("auto", 4))
    assert decision.split == Split()
    whole = next(one for one in decision.candidates if one.split == Split())
    assert whole.usage.hidden_share > 0.9
    assert whole.stages_ns[Kind.EXPERTS] == decision.candidates[0].stages_ns[Kind.EXPERTS]


def test_decode_with_few_tokens_stays_in_one_piece():
    assert decide(replace(BIG, tokens=128, experts=16), H200_NVLINK, splits_of("auto", 4)).split == SERIAL


def test_the_serial_step_is_the_sum_of_its_stages():
    decision = decide(BIG, H200_NVLINK, splits_of("off", 1))
    (serial,) = decision.candidates
    used = [Kind.ATTENTION, Kind.ROUTE, Kind.DISPATCH, Kind.EXPERTS, Kind.COMBINE, Kind.FINISH]
    assert serial.usage.step_ns == 8 * sum(serial.stages_ns[kind] for kind in used)
    assert decision.why.endswith("nothing else was allowed")


def test_modes_allow_what_they_say():
    assert splits_of("off", 4) == (SERIAL,)
    assert splits_of("microbatch", 1) == (Split(lanes=2),)
    assert splits_of("microbatch", 9) == (Split(lanes=2), Split(lanes=3), Split(lanes=4))
    assert all(split.chunks > 1 and split.lanes == 1 for split in splits_of("tile", 4))
    assert {split.lanes for split in splits_of("auto", 1)} == {1}
    assert splits_of("shared", 4) == (Split(),)
    assert splits_of("auto", 4)[-1] == Split()
    assert MODES == ("off", "microbatch", "tile", "shared", "auto")
    with pytest.raises(ConfigError, match="--overlap sideways: choose one of off, microbatch, tile, shared, auto"):
        splits_of("sideways", 2)


def test_a_machine_that_moves_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"machine\.link_gbytes_per_s = 0"):
        cpu_rank(0, 1)
