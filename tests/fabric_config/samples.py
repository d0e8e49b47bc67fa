"""What the tests of this folder share: the example fabrics, their configurations, and reference data where it is."""

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest

from bywash.fabric.config.emit import sonic_configs
from bywash.fabric.config.plan import FabricPlan, make_plan
from bywash.fabric.config.values import load_values, parse_values

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "fabrics"
DATA = ROOT.parent / "shared" / "data" / "fabric"
FABRICS = ("two-spine", "fat-tree", "rail-mixed")

needs_table = pytest.mark.skipif(
    not (DATA / "pg_profile_lookup.csv").exists(), reason="SONiC's headroom tables are not beside this checkout"
)


SMALL = "small"
"""Four leaves of four hosts and two spines: an audit of it takes milliseconds."""


@functools.cache
def plan_of(name: str) -> FabricPlan:
    if name == SMALL:
        shape = "leaf-spine:hosts=16,leaves=4,spines=2,gbps=400,length_m=5,uplink_length_m=40"
        return make_plan(*parse_values({"topology": shape, "switches": [{"asic": "sn4700"}]}))
    return make_plan(*load_values(EXAMPLES / f"{name}.yaml"))


@functools.cache
def _configs_text(name: str) -> str:
    return json.dumps(sonic_configs(plan_of(name)))


def configs_of(name: str) -> dict[str, Any]:
    """A fresh copy every time, to be spoilt."""
    configs: dict[str, Any] = json.loads(_configs_text(name))
    return configs


@functools.cache
def yang_models() -> Any:
    """SONiC's models, or a skip that says why."""
    from bywash.fabric.config.yang import YangModels, libyang_missing

    if missing := libyang_missing():
        pytest.skip(missing)
    if not (DATA / "sonic-yang").is_dir():
        pytest.skip("SONiC's YANG models are not beside this checkout")
    return YangModels(DATA / "sonic-yang")


def apply_patch(document: Any, operations: list[dict[str, Any]]) -> Any:
    """RFC 6902 add, replace and remove on objects, written from the RFC: the oracle of `rollout.patch`."""
    document = copy.deepcopy(document)
    for operation in operations:
        parts = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        place = document
        for part in parts[:-1]:
            place = place[part]
        if operation["op"] in ("replace", "remove"):
            assert parts[-1] in place, f"{operation['op']} of what is not there: {operation['path']}"
        if operation["op"] == "remove":
            del place[parts[-1]]
        else:
            place[parts[-1]] = operation["value"]
    return document
