"""`bywash run --slots --capacity-factor`: rows leave home on real processes, and the check against one rank holds."""

import json

import numpy as np
import pytest

from bywash.cli.main import app
from bywash.cli.summary import _overflow_lines
from bywash.errors import ConfigError

MODEL = "qwen3-moe-tiny"


def bywash(*args):
    app([str(a) for a in args], standalone_mode=False)


def run_checked(tmp_path, *more):
    out = tmp_path / "out.json"
    bywash("run", "--model", MODEL, "--tokens", 5, "--check", "--json", out, *more)
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    ("ranks", "exchange", "options"),
    [
        (3, "shm", ("--slots", 2, "--alpha", 1)),
        (2, "gloo", ("--slots", 3, "--capacity-factor", 0.5, "--alpha", 1, "--break-even", 2)),
    ],
)
def test_rows_leave_home_and_no_bit_changes(tmp_path, ranks, exchange, options):
    outcome = run_checked(tmp_path, "--ranks", ranks, "--exchange", exchange, *options)
    assert outcome["logits_identical"]
    assert outcome["tokens_identical"]
    overflow = outcome["overflow"]
    assert overflow["rows_spilled"] > 0
    assert overflow["fetches"] > 0
    assert overflow["fetched_bytes"] % overflow["fetches"] == 0
    assert 1 <= overflow["imbalance"] < overflow["imbalance_at_home"]
    assert overflow["rows_home"] + overflow["rows_spilled"] == np.sum(outcome["rows_per_layer_and_rank"])
    assert (overflow["rows_waited"] > 0) == (overflow["capacity_rows"] is not None)
    assert [layer["steps"] for layer in overflow["layers"]] == [5] * len(outcome["rows_per_layer_and_rank"])
    line = _overflow_lines(overflow)
    assert f"{overflow['rows_spilled']:,} of {np.sum(outcome['rows_per_layer_and_rank']):,} expert rows" in line
    assert ("waves" in line) == (overflow["capacity_rows"] is not None)


def test_a_capacity_alone_only_makes_rows_wait(tmp_path):
    outcome = run_checked(tmp_path, "--ranks", 1, "--capacity-factor", 0.25)
    overflow = outcome["overflow"]
    assert outcome["logits_identical"]
    assert overflow["rows_spilled"] == overflow["fetches"] == 0
    assert overflow["rows_waited"] > 0
    assert overflow["most_waves"] > 4


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--slots", -1], "--slots -1: must be 0 to 4096"),
        (["--slots", 2, "--alpha", 0.5], "--alpha 0.5: must be 1 to 64"),
        (["--slots", 2, "--alpha", "nan"], "--alpha nan: must be"),
        (["--capacity-factor", "nan"], "--capacity-factor nan: must be"),
        (["--alpha", 1.2], "--alpha 1.2: says which rows go to slots; give --slots too"),
        (["--capacity-factor", 1, "--break-even", 9], "give --slots too"),
        (["--slots", 2, "--break-even", 0], "--break-even 0: must be 1"),
        (["--slots", 2, "--overlap", "tile"], "leave out --slots"),
        (["--ranks", 1, "--slots", 2, "--capacity-factor", 0.01, "--break-even", 500], "below --break-even 500"),
    ],
)
def test_options_that_make_no_sense_are_refused(args, message):
    with pytest.raises(ConfigError) as refused:
        bywash("run", "--model", MODEL, "--tokens", 1, *args)
    assert message in str(refused.value)
