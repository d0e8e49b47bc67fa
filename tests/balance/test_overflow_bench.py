"""`bywash bench overflow` and `bywash plan memory`: policies on real and made-up counts, the budget's arithmetic."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from bywash.balance import Limits, Placement
from bywash.balance.rivals import at_home, eplb, llep
from bywash.bench.overflow import POLICIES, OverflowBench, measure, scaled_counts
from bywash.cli.main import app
from bywash.errors import ConfigError
from bywash.memory.budget import BudgetShape, Buffer, memory_budget

HEAP = Buffer(name="heap", bytes=1000, arithmetic="given")


def skewed_counts(layers=3, experts=64, seed=1):
    return np.random.default_rng(seed).lognormal(0, 1, (layers, experts)) * 1e6


def test_scaled_counts_are_whole_and_proportional():
    counts_LE = skewed_counts()
    steps_LRE = scaled_counts(counts_LE, ranks=8, rows=1001)
    assert (steps_LRE.sum(axis=3) == 1001).all()
    rows_LE = steps_LRE[0].sum(axis=1)
    assert np.abs(rows_LE - counts_LE / counts_LE.sum(axis=1, keepdims=True) * 8008).max() < 1
    assert (steps_LRE.max(axis=2) - steps_LRE.min(axis=2) <= 1).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_drops_a_row_and_all_but_none_balance(policy):
    steps_LRE = np.repeat(scaled_counts(skewed_counts(), ranks=8, rows=4096), 3, axis=0)
    bench = OverflowBench(ranks=8, slots=6, limits=Limits(), policy=policy)
    result = measure(bench, steps_LRE, (4, 5, 9))
    assert result["dropped_rows"] == 0
    assert [row["layer"] for row in result["layers"]] == [4, 5, 9]
    assert result["max_over_mean_before"] > 1.2
    if policy == "none":
        assert result["max_over_mean_after"] == result["max_over_mean_before"]
    else:
        assert result["max_over_mean_after"] < 1.05


def test_slots_that_stay_save_fetches():
    steps_LRE = np.repeat(scaled_counts(skewed_counts(layers=2), ranks=8, rows=4096), 5, axis=0)
    kept, forgotten = (
        measure(OverflowBench(ranks=8, slots=12, limits=Limits(), policy=policy), steps_LRE, (0, 1))
        for policy in ("bywash", "refetch")
    )
    assert kept["max_over_mean_after"] == forgotten["max_over_mean_after"]
    assert kept["fetches_per_step"] * 5 == forgotten["fetches_per_step"]  # the same counts: only the first step fetches


def test_rivals_deal_out_every_row():
    rng = np.random.default_rng(0)
    for _ in range(50):
        rows_E = rng.integers(0, 500, 24)
        placement = Placement.equal(24, 4)
        for outcome in (
            eplb(rows_E, rng.integers(1, 500, 24), 4, 2),
            llep(rows_E, placement),
            at_home(rows_E, placement),
        ):
            assert outcome.rows_R.sum() == rows_E.sum()
            assert (outcome.rows_R >= 0).all()
        assert llep(rows_E, placement).rows_R.max() <= -(-rows_E.sum() // 4)


def test_rearranging_uses_no_slot():
    steps_LRE = scaled_counts(skewed_counts(), ranks=8, rows=4096)
    blocks, rearranged = (
        measure(OverflowBench(ranks=8, slots=0, limits=Limits(), rearrange=r), steps_LRE, (0, 1, 2))
        for r in (False, True)
    )
    assert rearranged["max_over_mean_after"] < blocks["max_over_mean_after"]
    assert rearranged["fetches_per_step"] == blocks["fetches_per_step"] == 0


def test_command_reads_counts_and_traces(tmp_path):
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"logical_count": [[0] * 16, list(range(1, 17))]}))
    out = tmp_path / "out.json"
    result = CliRunner().invoke(
        app, ["bench", "overflow", "--counts", str(path), "--ep", "4", "--slots", "2", "--json", str(out)]
    )
    assert result.exit_code == 0, result.output
    data = json.loads(out.read_text())
    assert [row["layer"] for row in data["layers"]] == [1]  # the all-zero layer is dense
    assert set(data["layers"][0]) >= {"max_over_mean_before", "max_over_mean_after", "fetches", "rows_spilled"}
    assert data["dropped_rows"] == 0
    assert data["plan_us_median"] > 0
    shipped = CliRunner().invoke(app, ["bench", "overflow", "--counts", "mixed", "--ep", "4", "--alpha", "1.1"])
    assert shipped.exit_code == 0
    assert "0 rows dropped" in shipped.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "best"], "--policy best"),
        (["--ep", "0"], "--ep 0"),
        (["--alpha", "0.5"], "--alpha 0.5"),
        (["--break-even", "0"], "--break-even 0: must be 1 to"),
        (["--capacity", "5", "--break-even", "9"], "no slot could ever be used"),
    ],
)
def test_bad_options_are_named(options, message):
    result = CliRunner().invoke(app, ["bench", "overflow", "--counts", "mixed", *options])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def shape(**changes):
    values = {"hidden": 64, "intermediate": 32, "experts": 16, "top_k": 4, "moe_layers": 3, "ranks": 4, "tokens": 100}
    return BudgetShape(**{**values, "slots": 2, "capacity_factor": 1.5, **changes})


def test_budget_by_hand():
    # C = 1.5 x 1600 pairs / 16 = 150 rows; 4 home experts x 150, and slots get at most 2 x 150
    assert shape().capacity == 150
    assert shape().held_pairs == 4 * 150 + 2 * 150
    sizes = {buffer.name: buffer.bytes for buffer in memory_budget(shape(), HEAP)}
    assert sizes["heap"] == 1000
    assert sizes["slots"] == 2 * 3 * 64 * 32 * 2
    assert sizes["home weights"] == 3 * 4 * 3 * 64 * 32 * 2
    assert sizes["outputs"] == 900 * 64 * 2
    assert sizes["intermediate"] == 900 * 32 * 2


def test_no_plan_holds_more_pairs_than_the_budget():
    """Whatever the counts, what a rank holds at once under the plan fits `held_pairs`."""
    from bywash.balance import SlotDirectory, plan_step

    rng, s = np.random.default_rng(11), shape()
    placement = Placement.equal(16, 4)
    limits = Limits(capacity=s.capacity)
    for _ in range(300):
        weights = rng.dirichlet(np.full(16, rng.choice([0.05, 0.3, 2.0])))
        tokens_R = rng.integers(0, s.tokens + 1, 4)
        # no more than one row of each token: top-4 of distinct experts
        ids = [
            np.array([rng.choice(16, 4, replace=False, p=(weights + 1e-6) / (weights + 1e-6).sum()) for _ in range(t)])
            for t in tokens_R
        ]
        counts_RE = np.array([np.bincount(i.ravel().astype(int), minlength=16) for i in ids], np.int32)
        plan = plan_step(counts_RE, placement, limits, SlotDirectory.empty(ranks=4, slots=2, experts=16))
        held_ER = plan.rows_ER.clip(max=s.capacity)
        assert held_ER.sum(axis=0).max() <= s.held_pairs
        assert (plan.rows_ER <= np.where(np.arange(4) == placement.home_E[:, None], 1600, s.capacity)).all()


def test_memory_command_adds_up(tmp_path):
    out = tmp_path / "memory.json"
    result = CliRunner().invoke(app, ["plan", "memory", "--json", str(out)])
    assert result.exit_code == 0, result.output
    data = json.loads(out.read_text())
    assert data["total_bytes"] == sum(buffer["bytes"] for buffer in data["buffers"])
    assert data["held_pairs"] < data["uncapped_pairs"]
    assert f"{data['total_bytes']:,}" in result.output


@pytest.mark.parametrize(
    "values",
    [{"hidden": 0}, {"slots": -1}, {"top_k": 17}, {"capacity_factor": -1.0}, {"capacity_factor": float("nan")}],
)
def test_impossible_shapes_name_the_field(values):
    with pytest.raises(ConfigError, match=f"memory.{next(iter(values))}"):
        shape(**values)
