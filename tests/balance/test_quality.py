"""How even plans get: against the optimum on small layers, and on real counts where they were downloaded."""

import statistics

import pytest
from benchmarks.balance.real_counts import PUBLIC, all_layers
from benchmarks.balance.tables import exact, policy_result, run_decode


def test_small_layers_are_within_two_percent_of_the_optimum(capsys):
    pytest.importorskip("scipy", reason="the exact solver is scipy's: pip install 'bywash[dev]'")
    gap = exact(8)[-1]
    assert gap["gap mean"] <= 0.002
    assert gap["gap worst"] <= 0.02
    assert "HiGHS" in capsys.readouterr().out


@pytest.mark.parametrize(("ranks", "slots"), [(8, 4), (32, 2)])
@pytest.mark.parametrize("model", ["bywash-tiny", "deepseek-v3", "olmoe", "llama-4"])
def test_real_layers_become_even(model, ranks, slots):
    chosen = [layers for layers in all_layers() if layers.name.startswith(model)]
    if not chosen:
        pytest.skip(f"{model}: its counts are not here")
    results = [policy_result(layers, ranks, slots, "bywash") for layers in chosen[:3]]
    after = [row["max_over_mean_after"] for result in results for row in result["layers"]]
    assert statistics.mean(after) <= 1.02
    assert max(after) <= 1.05
    assert not any(result["dropped_rows"] for result in results)


@pytest.mark.skipif(not (PUBLIC / "llama4_mmlu_traces").exists(), reason="the Llama-4 trace is not here")
@pytest.mark.parametrize("topic_every", [0, 40], ids=["mixed topics", "changing topics"])
@pytest.mark.parametrize("batch", [128, 387])
def test_slots_that_stay_need_a_tenth_of_the_fetches(batch, topic_every):
    setting = {"alpha": 1.1, "steps": 80, "warm": 20, "ranks": 8, "slots": 24}
    refetch, kept = (run_decode(batch, topic_every, kept=kept, **setting) for kept in (False, True))
    assert kept[0] == pytest.approx(refetch[0], abs=0.002)  # as even
    assert kept[1] <= 0.1 * refetch[1]
