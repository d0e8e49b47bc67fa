"""The compiled planner and numba's cache on disk, which by itself sees changes of the cached function's file only."""

import ast
import os
import shutil
import subprocess
import sys
from inspect import getclosurevars, getsource
from pathlib import Path

import pytest
from numba.core.caching import NullCache
from numba.core.dispatcher import Dispatcher

import bywash
from bywash.balance import fast, fast_keep

PLAN_TWICE = """
import numpy as np
from bywash.balance import Limits, Placement, SlotDirectory, plan_step
directory = SlotDirectory.empty(ranks=2, slots=1, experts=2, layers=1)
for _ in range(2):
    counts_RE = np.array([[9, 0], [9, 0]], np.int32)
    directory = plan_step(counts_RE, Placement.equal(2, 2), limits=Limits(), directory=directory).directory
print(directory.hot_LE[0, 0])
"""


def test_all_that_a_plan_is_compiled_from_is_in_the_caches_key():
    for module in (fast, fast_keep):
        for node in ast.walk(ast.parse(getsource(module))):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("bywash."):
                assert node.module.removeprefix("bywash.balance.") in fast.SOURCES
        for name, value in vars(module).items():
            if isinstance(value, Dispatcher) and value is not fast.plan_arrays:
                assert isinstance(value._cache, NullCache), f"{name} would be taken from a cache of its own"
    assert not isinstance(fast.plan_arrays._cache, NullCache)
    assert getclosurevars(fast.plan_arrays.py_func).nonlocals["VERSION"] == fast._sources()


@pytest.mark.slow
def test_a_constant_that_changes_in_another_file_changes_plans(tmp_path):
    shutil.copytree(Path(bywash.__file__).parent, tmp_path / "bywash", ignore=shutil.ignore_patterns("__pycache__"))
    limits = tmp_path / "bywash" / "balance" / "limits.py"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    heat = []
    for plans in (32, 2):
        text = limits.read_text()
        assert "HOT_PLANS, MOST_HOT_ROWS = 32," in text
        limits.write_text(text.replace("HOT_PLANS, MOST_HOT_ROWS = 32,", f"HOT_PLANS, MOST_HOT_ROWS = {plans},"))
        run = subprocess.run(
            [sys.executable, "-c", PLAN_TWICE], env=environment, capture_output=True, text=True, check=True, timeout=600
        )
        heat.append(int(run.stdout))
    assert heat == [36, 27]  # 18 + 18, and 18 - 18 // 2 + 18
