"""The loop: run with --trace, plan from that trace, run with --plan. What was predicted is what is then measured."""

import json

import pytest
import yaml

from bywash.cli.main import app

CLUSTER = {"name": "laptop", "nodes": [{"name": "laptop", "device": "cpu", "devices": 3}]}
TOKENS = 6


def bywash(*args):
    app([str(arg) for arg in args], standalone_mode=False)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run over three ranks, in order, and its trace."""
    folder = tmp_path_factory.mktemp("loop")
    bywash(
        "run", "--ranks", 3, "--exchange", "shm", "--tokens", TOKENS, "--trace", folder / "trace.npz",
        "--json", folder / "first.json",
    )  # fmt: skip
    (folder / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    return folder


@pytest.mark.parametrize("slots", [0, 3])
def test_predicted_rows_are_the_measured_rows(recorded, tmp_path, slots):
    bywash(
        "plan", "--cluster", recorded / "cluster.yaml", "--model", "bywash-tiny", "--trace", recorded / "trace.npz",
        "--sequences", 2, "--prompt-tokens", 20, "--output-tokens", TOKENS, "--chunk-tokens", 64, "--slots", slots,
        "--out", tmp_path,
    )  # fmt: skip
    (group,) = yaml.safe_load((tmp_path / "plan.yaml").read_text())["groups"]
    bywash("run", "--plan", tmp_path / "plan.yaml", "--tokens", TOKENS, "--json", tmp_path / "second.json")
    first = json.loads((recorded / "first.json").read_text())
    second = json.loads((tmp_path / "second.json").read_text())
    predicted = group["predicted"]
    assert second["tokens"] == first["tokens"]
    assert second["rows_per_layer_and_rank"] == predicted["rows_per_layer_and_rank"]
    assert second["imbalance_max_over_mean"] == predicted["imbalance_max_over_mean"] < first["imbalance_max_over_mean"]
    assert second["rows_per_layer_and_rank"] != first["rows_per_layer_and_rank"]
    if slots:
        assert second["overflow"]["slots"] == slots
        assert second["overflow"]["rows_spilled"] == predicted["rows_spilled"] > 0
        assert second["overflow"]["fetches"] == predicted["fetches"] > 0
