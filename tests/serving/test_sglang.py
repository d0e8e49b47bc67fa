"""SGLang's two protocols, on a stand-in: `sglang_standin` says what that shows and what not."""

import sys

import pytest

from bywash.errors import ConfigError
from bywash.serving import sglang_plugin
from tests.serving import sglang_steps


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_layer_on_ranks_gives_the_same_as_on_one(pools, ranks):
    counters = pools(ranks).run(sglang_steps.layer_on_ranks)
    assert all(rank["moe_steps"] == 12 and rank["moe_extra_steps"] == 0 for rank in counters)
    assert sum(rank["exchange_rows_sent"] for rank in counters) > 0


def test_switches(monkeypatch):
    monkeypatch.delenv("BYWASH_SGLANG", raising=False)
    monkeypatch.setitem(sys.modules, "sglang", None)  # as if none were installed
    sglang_plugin.register()  # would import SGLang if it were switched on
    assert not sglang_plugin.asked_for()
    monkeypatch.setenv("BYWASH_SGLANG", "1")
    with pytest.raises(ConfigError, match="does not fit this one"):
        sglang_plugin.register()
    monkeypatch.setenv("BYWASH_SGLANG", "on")
    with pytest.raises(ConfigError, match="BYWASH_SGLANG=on"):
        sglang_plugin.asked_for()
    monkeypatch.setenv("BYWASH_MAX_TOKENS", "many")
    with pytest.raises(ConfigError, match="BYWASH_MAX_TOKENS=many"):
        sglang_plugin.most_tokens()
