import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bywash.balance import Placement
from bywash.errors import ConfigError
from bywash.exchange.cost import Rates, Step, choose
from bywash.exchange.peer_layout import PeerLayout
from bywash.exchange.select import open_device_exchange, select

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def layout_of(**changes):
    sizes = {"ranks": 2, "experts": 256, "top_k": 8, "tokens": 4096, "hidden": 7168, "exact": False}
    return PeerLayout(**{**sizes, "dtype": torch.bfloat16, **changes})


@given(
    ranks=st.integers(1, 16),
    tokens=st.integers(1, 20_000),
    combine=st.sampled_from(["stable", "fast"]),
    overlapped=st.booleans(),
    copy_gbytes_per_s=st.sampled_from([100.0, 386.0, 800.0]),
)
def test_auto_is_what_explain_shows(ranks, tokens, combine, overlapped, copy_gbytes_per_s):
    layout, rates = layout_of(ranks=ranks, tokens=tokens), Rates(copy_gbytes_per_s=copy_gbytes_per_s)
    step = Step(ranks=ranks, tokens=tokens, hidden=7168, item_bytes=2, top_k=8, experts=256, combine=combine)
    shown = choose(step, rates, overlapped=overlapped)
    taken = select(layout, combine_mode=combine, equal_rows=True, overlapped=overlapped, rates=rates)
    assert (taken.algorithm, taken.why) == (shown.algorithm, shown.why)


def test_both_answers_occur():
    quick_copies = Rates(copy_gbytes_per_s=1600.0)
    assert select(layout_of(), combine_mode="fast", equal_rows=True).algorithm == "all-to-all"
    assert select(layout_of(), combine_mode="fast", equal_rows=True, overlapped=True).algorithm == "all-gather"
    assert select(layout_of(), combine_mode="fast", equal_rows=True, rates=quick_copies).algorithm == "all-gather"


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({"exact": True}, {"combine_mode": "exact", "equal_rows": True}, "`exact` returns every pair"),
        ({"fp8": "amax"}, {"combine_mode": "fast", "equal_rows": True}, "fp8 rows are made while the kernel sends"),
        ({}, {"combine_mode": "stable", "equal_rows": False}, "ranks may bring different numbers of rows"),
    ],
)
def test_what_all_gather_cannot_carry(changes, options, reason):
    taken = select(layout_of(**changes), overlapped=True, **options)
    assert taken.algorithm == "all-to-all"
    assert taken.why.startswith(f"the only way: {reason}")
    with pytest.raises(ConfigError, match=f"algorithm all-gather: {reason}.*; use all-to-all"):
        select(layout_of(**changes), algorithm="all-gather", **options)
    assert select(layout_of(**changes), algorithm="all-to-all", **options).why == "asked for"


def test_an_unknown_algorithm_is_refused():
    with pytest.raises(ConfigError, match="algorithm 'ring': choose one of auto, all-to-all, all-gather"):
        select(layout_of(), combine_mode="fast", algorithm="ring")


@pytest.mark.skipif(GPUS > 0, reason="this machine has a GPU")
@pytest.mark.parametrize(
    ("algorithm", "who"), [("all-to-all", "exchange peer"), ("all-gather", "exchange by copy engine")]
)
def test_each_algorithm_opens_its_own_end(algorithm, who):
    home_E = Placement.equal(256, 2).home_E
    with pytest.raises(ConfigError, match=f"{who}: no CUDA device"):
        open_device_exchange(None, layout_of(), home_E, algorithm=algorithm, equal_rows=True)
