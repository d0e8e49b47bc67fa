"""From a setting to a values file, and from there to switches and NICs."""

import json
from dataclasses import replace

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from bywash.errors import ConfigError
from bywash.fabric.config.audit import audit
from bywash.fabric.config.emit import files, sonic_configs
from bywash.fabric.config.plan import make_plan
from bywash.fabric.config.values import parse_values
from bywash.fabric.tune import Effort, tune, tuning_json, tuning_text, values_text
from bywash.fabric.tune.objective import planned, space_of
from bywash.fabric.tune.report import values_data
from bywash.fabric.tune.space import vendor
from tests.fabric_tune.samples import SMALL, cases, plan_of


def plan_with(setting):
    return make_plan(*parse_values(values_data(SMALL, setting, 100.0)))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_every_setting_that_may_be_chosen_passes_plan_and_audit_and_comes_back(seed):
    space = space_of(plan_of(), 100.0, sending=True)
    setting = space.mutate(vendor(100), np.random.default_rng(seed), share=0.7)
    plan = plan_with(setting)
    assert audit(sonic_configs(plan), {}, {}, plan=plan, table=None) == []
    assert planned(plan, 100.0) == setting


def test_what_was_chosen_reaches_switches_and_nics():
    space = space_of(plan_of(), 100.0, sending=True)
    setting = space.mutate(vendor(100), np.random.default_rng(1), share=1.0)
    made = files(plan_with(setting))
    for switch in ("leaf0", "spine1"):
        config = json.loads(made[f"{switch}.json"])
        (wred,) = config["WRED_PROFILE"].values()
        assert wred["green_min_threshold"] == str(setting.kmin_bytes)
        assert wred["green_max_threshold"] == str(setting.kmax_bytes)
        assert wred["green_drop_probability"] == str(setting.pmax_percent)
        lossless = [p for name, p in config["BUFFER_PROFILE"].items() if name.startswith("pg_lossless")]
        assert {profile["dynamic_th"] for profile in lossless} == {str(setting.dynamic_th)}
    script = made["server0.nic.sh"]
    for name, value in (
        ("min_time_between_cnps", setting.cnp_interval_us),
        ("dce_tcp_g", setting.alpha_g),
        ("dce_tcp_rtt", setting.alpha_timer_us),
        ("rpg_time_reset", setting.increase_timer_us),
        ("rpg_byte_reset", setting.byte_counter_bytes),
        ("rpg_threshold", setting.fast_recovery_steps),
        ("rpg_ai_rate", setting.increase_mbps),
        ("rpg_hai_rate", 10 * setting.increase_mbps),
    ):
        assert f"/{name} {value}\n" in script
    if setting.active:
        assert f"at most {setting.active} messages" in made["plan.md"]


def test_how_senders_send_is_told_to_the_exchange():
    fits = planned(plan_of(), 100.0)
    made = files(plan_with(replace(fits, pace_by_counts=1.25)))
    assert "each message paced to 1.25 times its share of the receiver's link" in made["plan.md"]
    assert planned(plan_with(replace(fits, active=2)), 100.0).active == 2
    written = values_data(SMALL | {"sending": {"active": 2}}, fits, 100.0)
    assert "sending" not in written  # what the file had is not what was chosen


def test_links_of_another_rate_take_thresholds_in_proportion():
    data = SMALL | {"topology": "leaf-spine:hosts=8,leaves=2,spines=2,gbps=50,uplink_gbps=100,length_m=5"}
    data |= {"marking": {"gbps": 100, "kmin_bytes": 20_000, "kmax_bytes": 80_000, "pmax_percent": 10}}
    plan = make_plan(*parse_values(data))
    found = {wred.gbps: wred.marking.kmin_bytes for switch in plan.switches for wred in switch.wreds}
    assert found == {50: 10_000, 100: 20_000}


@pytest.mark.parametrize(
    ("marking", "message"),
    [
        ({"kmin_bytes": 2_000_000, "kmax_bytes": 2_000_000}, "leaf0: marking.kmin_bytes: 2,000,000 B .* must be below"),
        ({"kmin_bytes": 20_000, "kmax_bytes": 3_000_000}, "leaf0: marking.kmax_bytes: 3,000,000 B .* pause at"),
        ({"kmin_bytes": 2, "kmax_bytes": 1}, "kmin_bytes 2 exceeds kmax_bytes 1"),
        ({"kmin_bytes": 20_000}, "marking.kmax_bytes: must be given"),
    ],
)
def test_marking_that_comes_too_late_is_refused(marking, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(*parse_values(SMALL | {"marking": {"gbps": 100, "pmax_percent": 5} | marking}))


def test_text_json_and_file_say_the_same():
    tuning = tune(plan_of(), cases(1), cases(2, first_seed=50), Effort(budget=20))
    best, text, data = tuning.found.best, "\n".join(tuning_text(tuning)), tuning_json(tuning)
    assert json.loads(json.dumps(data, allow_nan=False))["tuned"]["kmin_bytes"] == best.kmin_bytes
    assert f"{best.kmax_bytes:,}" in text
    assert [row["name"] for row in data["heldout"]] == [row.name for row in tuning.rows]
    for row in tuning.rows:
        assert row.name in text
    written = yaml.safe_load(values_text(SMALL, tuning))
    assert written["marking"]["kmin_bytes"] == best.kmin_bytes
    assert {key: written[key] for key in SMALL} == SMALL
