"""Ratios and their intervals."""

import math

import numpy as np
import pytest

from bywash.fabric.tune import compare
from bywash.fabric.tune.objective import Outcome


def outcomes(times, paused=0.0):
    return [
        Outcome(p99_us=t, mean_us=t / 2, whole_us=2 * t, pause_share=paused, peak_queue_bytes=1000, drops=0, floor_us=t)
        for t in times
    ]


def test_a_constant_ratio_is_known_exactly():
    times = np.array([100.0, 300.0, 70.0])
    rows = {row.name: row for row in compare({"slow": outcomes(1.5 * times), "tuned": outcomes(times)}, "tuned")}
    for metric in ("p99_us", "mean_us", "whole_us"):
        ratio = rows["slow"].ratios[metric]
        assert [ratio.value, ratio.low, ratio.high] == pytest.approx([1.5, 1.5, 1.5])
        assert rows["tuned"].ratios[metric].value == 1.0


def test_pairing_takes_out_what_cases_have_in_common():
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.normal(0, 2, 20))
    noisy = outcomes(100 * sizes * np.exp(rng.normal(0.1, 0.01, 20)))
    (row, _) = compare({"slow": noisy, "tuned": outcomes(100 * sizes)}, "tuned")
    assert 1.08 < row.ratios["p99_us"].low < row.ratios["p99_us"].value < row.ratios["p99_us"].high < 1.13


@pytest.mark.slow
def test_intervals_cover_as_often_as_they_say():
    """200 draws of 15 cases from a known ratio: a percentile bootstrap covers somewhat less than 95 %."""
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        base = np.exp(rng.normal(5, 1, 15))
        slow = outcomes(base * np.exp(rng.normal(0.2, 0.3, 15)))
        (row, _) = compare({"slow": slow, "tuned": outcomes(base)}, "tuned")
        hits += row.ratios["whole_us"].low <= math.exp(0.2) <= row.ratios["whole_us"].high
    assert 0.86 <= hits / 200 <= 0.98


def test_a_case_not_completed_makes_the_ratio_infinite():
    (row, _) = compare({"slow": outcomes([math.inf, 1.0]), "tuned": outcomes([1.0, 1.0])}, "tuned")
    assert row.ratios["p99_us"].value == math.inf


def test_pause_shares_are_means():
    (row,) = compare({"tuned": outcomes([1.0], 0.1) + outcomes([1.0], 0.3)}, "tuned")
    assert row.pause_share.value == pytest.approx(0.2)
    assert row.pause_share.low == pytest.approx(0.1)
    assert row.pause_share.high == pytest.approx(0.3)
