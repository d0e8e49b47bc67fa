"""plan.cu: it compiles for every architecture, and equals the naive planner in an emulated block and on a GPU."""

import ctypes
import platform
import re
import shutil
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from bywash.balance import Limits, Placement, SlotDirectory, limits, naive
from bywash.balance.limits import ATTEMPTS, MOST_AGE
from bywash.errors import ConfigError
from bywash.kernels.compile import compiler_version, kernel_source
from bywash.kernels.plan import SOURCES, THREADS, compile_plan, empty_hash, parameter_names, places
from tests.balance.plan_cases import Oracle, draw_counts, draw_like

SOURCE = kernel_source(SOURCES)
SHAPES = [(8, 256, 4), (64, 96, 2), (3, 7, 2), (5, 13, 0), (2, 8, 40), (33, 70, 3)]
shapes = pytest.mark.parametrize(("ranks", "experts", "slots"), SHAPES, ids=["-".join(map(str, s)) for s in SHAPES])


def needs_nvrtc():
    pytest.importorskip("cuda.core", reason="cuda-core is not installed: pip install 'bywash[cuda]'")
    try:
        compiler_version()
    except ConfigError as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
@shapes
def test_compiles(ranks, experts, slots, arch, tmp_path):
    needs_nvrtc()
    code = compile_plan(ranks, experts, slots, arch, cache=tmp_path)
    assert code[:4] == b"\x7fELF"
    assert b"plan_shared_bytes" in code


@pytest.mark.parametrize(("ranks", "experts", "slots"), [(65, 8, 1), (8, 2000, 1), (8, 8, 129), (0, 8, 1)])
def test_shapes_beyond_the_limits_are_refused(ranks, experts, slots):
    with pytest.raises(ConfigError, match="are supported on a GPU"):
        compile_plan(ranks, experts, slots, "sm_90")


def test_numbers_agree_with_python():
    assert f"#define THREADS {THREADS}\n" in SOURCE
    assert f"#define ATTEMPTS {ATTEMPTS}\n" in SOURCE
    assert THREADS == 32 * ATTEMPTS
    assert "#define MOST_AGE ((1 << 30) - 1)\n" in SOURCE
    assert MOST_AGE == (1 << 30) - 1
    for name in ("HOT_PLANS", "KEEP_ENTRIES", "KEEP_MOVES", "KEEP_FETCHES"):
        assert f"#define {name} {getattr(limits, name)}\n" in SOURCE
    assert f"#define FIRST_PART {ATTEMPTS // limits.REFINED}  " in SOURCE
    assert "#define MOST_HOT_ROWS (1 << 25)\n" in SOURCE
    assert limits.MOST_HOT_ROWS == 1 << 25
    assert len(set(parameter_names())) == 22


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """Ask for `emulated(ranks, experts, slots)`: a function that plans like `plan.cu` and returns its arrays."""
    compiler = shutil.which("g++")
    if compiler is None or platform.machine() != "x86_64" or platform.system() != "Linux":
        pytest.skip("the block emulator needs g++ on x86-64 Linux")
    folder = tmp_path_factory.mktemp("plan")
    text = SOURCE.replace("extern __shared__ u64 plan_memory[];", "static u64* plan_memory;")
    text = re.sub(r"^(#pragma unroll|#line|extern \"C\" __device__).*$", "", text, flags=re.MULTILINE)
    (folder / "plan.inc").write_text(text)

    @cache
    def build(ranks, experts, slots):
        library = folder / f"plan-{ranks}-{experts}-{slots}.so"
        subprocess.run(
            [compiler, "-O1", "-w", "-std=c++17", "-shared", "-fPIC", f"-DRANKS={ranks}", f"-DEXPERTS={experts}",
             f"-DSLOTS={slots}", f'-DKERNEL_FILE="{folder / "plan.inc"}"', "-o", library,
             str(Path(__file__).with_name("block_emulator.cpp"))],
            check=True, timeout=200,
        )  # fmt: skip
        return Emulated(ctypes.CDLL(str(library)))

    return build


class Emulated:
    """Plans of one shape. As on a device, rows_ER stays from plan to plan, as long as the placement is the same."""

    def __init__(self, library):
        self._library, self._placement = library, None

    def __call__(self, counts_RE, placement, limits, directory, layer):
        ranks, experts = counts_RE.shape
        slots = directory.keys_RS.shape[1]
        expert_P, first_R = places(placement)
        if placement is not self._placement:
            self._placement, self._away = placement, np.ones(1, np.uint32)
            self._rows_ER = np.full((experts, ranks), 77, np.int32)
        arrays = {
            "counts_RE": counts_RE,
            "home_E": placement.home_E,
            "expert_P": expert_P,
            "first_R": first_R,
            "speeds_R": limits.speeds_R(ranks).astype(np.int32),
            "keys_RS": directory.keys_RS.copy(),
            "ages_RS": directory.ages_RS.copy(),
            "hot_LE": directory.hot_LE.copy(),
            "away": self._away,
            "rows_ER": self._rows_ER,
            "fetch_RS": np.full((ranks, slots), 77, np.int32),
            "rows_R": np.full(ranks, 77, np.int64),
            "digest": np.zeros(1, np.uint32),
            "pieces": np.zeros(ATTEMPTS * ranks * slots + 1, np.uint64),
        }
        values = {name: array.ctypes.data for name, array in arrays.items()}
        values |= {"layer": layer, "layers": directory.layers, "empty_hash": empty_hash(placement, slots)}
        values |= {n: getattr(limits, n) for n in ("capacity", "alpha_1024", "fetch_rows", "use_rows", "keep")}
        words = [values[name] for name in parameter_names()]
        self._library.run_plan((ctypes.c_uint64 * len(words))(*words))
        return arrays


class OnGpu:
    """The kernel itself, with the emulator's interface."""

    def __init__(self, placement, limits, directory):
        from bywash.kernels.plan import DevicePlanner

        self._planner = DevicePlanner(placement, limits, directory)

    def __call__(self, counts_RE, placement, limits, directory, layer):
        self._planner(torch.from_numpy(counts_RE).cuda(), layer)
        names = ("keys_RS", "ages_RS", "hot_LE", "rows_ER", "fetch_RS", "rows_R", "digest")
        found = {name: getattr(self._planner, name).cpu().numpy() for name in names}
        return found | {"digest": found["digest"].view(np.uint32)}


def random_setting(rng, ranks, experts, slots):
    layers = int(rng.integers(1, 4))
    home_E = rng.integers(0, ranks, experts).astype(np.int32)
    capacity = int(rng.choice([3, 30, 200, 10**6]))
    limits = Limits(
        capacity=capacity,
        alpha_1024=int(rng.choice([1024, 1100, 1500])),
        fetch_rows=min(capacity, int(rng.choice([1, 2, 9]))),
        use_rows=min(capacity, int(rng.choice([1, 2, 5]))),
        keep=int(rng.choice([0, layers])),
        speeds=() if rng.random() < 0.6 else (1, *(int(speed) for speed in rng.integers(0, 5, ranks - 1))),
    )
    placement = Placement.equal(experts, ranks) if rng.random() < 0.5 else Placement(home_E=home_E, ranks=ranks)
    return placement, limits, SlotDirectory.empty(ranks=ranks, slots=slots, experts=experts, layers=layers)


def compare(planner, rng, placement, limits, directory, plans):
    """Plans in turn on one directory; returns how many moved rows.

    The oracle is the naive planner: numba would first compile for many seconds on a GPU machine that is new.
    """
    oracle, experts, spilled = Oracle(placement, limits, directory), np.arange(placement.num_experts), 0
    last, steady = {}, rng.random() < 0.6
    for number in range(plans):
        layer, shape = number % directory.layers, rng.choice(["random", "one expert", "one donor", "equal", "top-1"])
        if steady and layer in last:
            shape, counts_RE = "as before", draw_like(rng, last[layer])
        else:
            counts_RE = draw_counts(rng, placement.ranks, placement.num_experts, shape)
        last[layer] = counts_RE
        expected, found = oracle(counts_RE, layer), planner(counts_RE, placement, limits, directory, layer)
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=f"{name} of plan {number}, {shape}, {limits}")
        spilled += expected["rows_ER"][experts, placement.home_E].sum() < counts_RE.sum()
        directory = replace(directory, **{name: expected[name] for name in ("keys_RS", "ages_RS", "hot_LE")})
    return spilled


@pytest.mark.parametrize(
    ("ranks", "experts", "slots"),
    [pytest.param(*s, marks=[pytest.mark.slow] * (s[0] == 64), id="-".join(map(str, s))) for s in SHAPES],
)
def test_an_emulated_block_equals_the_cpu(ranks, experts, slots, emulated):
    planner, rng = emulated(ranks, experts, slots), np.random.default_rng(ranks)
    spilled = sum(compare(planner, rng, *random_setting(rng, ranks, experts, slots), plans=6) for _ in range(5))
    assert spilled >= 5 or slots == 0


@pytest.mark.parametrize(("ranks", "experts", "slots"), [(8, 256, 4), (33, 70, 3)])
def test_an_emulated_block_keeps_slots_as_the_cpu_does(ranks, experts, slots, emulated):
    """Steps of decode: nearly the same counts again and again, so that chains over slots are found."""
    check_steady(emulated(ranks, experts, slots), ranks, experts, slots)


def check_steady(planner, ranks, experts, slots, plans=12):
    rng, limits = np.random.default_rng(slots), Limits(alpha_1024=1080)
    setting = Placement.equal(experts, ranks), limits, SlotDirectory.empty(ranks=ranks, slots=slots, experts=experts)
    popular_E = rng.lognormal(0, 1, experts)
    counts = rng.multinomial(64, popular_E / popular_E.sum(), size=(plans, ranks)).astype(np.int32)
    oracle, directory, kept = Oracle(*setting), setting[2], 0
    for number, counts_RE in enumerate(counts):
        expected, found = oracle(counts_RE), planner(counts_RE, setting[0], limits, directory, 0)
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=f"{name} of plan {number}")
        moved = expected["rows_ER"].sum() > expected["rows_ER"][np.arange(experts), setting[0].home_E].sum()
        kept += moved and (expected["fetch_RS"] < 0).all()
        directory = replace(directory, **{name: expected[name] for name in ("keys_RS", "ages_RS", "hot_LE")})
    assert kept >= 2


@pytest.mark.parametrize(("ranks", "experts", "slots"), [(8, 256, 4), (3, 7, 2)])
def test_an_emulated_block_plans_afresh_as_the_cpu_does(ranks, experts, slots, emulated, monkeypatch):
    check_changing(emulated(ranks, experts, slots), ranks, experts, slots, monkeypatch)


def check_changing(planner, ranks, experts, slots, monkeypatch, plans=30):
    """Steps of prefill: other hot experts every time, so that what full slots hold is in the way."""
    winners, best_attempt = [], naive._best_attempt
    monkeypatch.setattr(naive, "_best_attempt", lambda *given: winners.append(best_attempt(*given)) or winners[-1])
    rng, limits = np.random.default_rng(slots), Limits(alpha_1024=1044)
    setting = Placement.equal(experts, ranks), limits, SlotDirectory.empty(ranks=ranks, slots=slots, experts=experts)
    oracle, directory = Oracle(*setting), setting[2]
    for number in range(plans):
        popular_E = rng.lognormal(0, 1, experts)
        counts_RE = rng.multinomial(4096, popular_E / popular_E.sum(), size=ranks).astype(np.int32)
        expected, found = oracle(counts_RE), planner(counts_RE, setting[0], limits, directory, 0)
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=f"{name} of plan {number}")
        directory = replace(directory, **{name: expected[name] for name in ("keys_RS", "ages_RS", "hot_LE")})
    assert {True, False} == {winner.afresh for winner in winners}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("ranks", "experts", "slots"), [(8, 256, 4), (3, 7, 2)])
def test_the_gpu_plans_afresh_as_the_cpu_does(ranks, experts, slots, monkeypatch):
    directory = SlotDirectory.empty(ranks=ranks, slots=slots, experts=experts)
    planner = OnGpu(Placement.equal(experts, ranks), Limits(alpha_1024=1044), directory)
    check_changing(planner, ranks, experts, slots, monkeypatch)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("ranks", "experts", "slots"), [(8, 256, 4), (33, 70, 3)])
def test_the_gpu_keeps_slots_as_the_cpu_does(ranks, experts, slots):
    directory = SlotDirectory.empty(ranks=ranks, slots=slots, experts=experts)
    planner = OnGpu(Placement.equal(experts, ranks), Limits(alpha_1024=1080), directory)
    check_steady(planner, ranks, experts, slots)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@shapes
def test_the_gpu_equals_the_cpu(ranks, experts, slots):
    rng = np.random.default_rng(ranks)
    for _ in range(5):
        setting = random_setting(rng, ranks, experts, slots)
        compare(OnGpu(*setting), rng, *setting, plans=6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_plan_on_the_gpu_follows_the_counts():
    placement, limits = Placement.equal(64, 4), Limits()
    directory = SlotDirectory.empty(ranks=4, slots=3, experts=64)
    from bywash.kernels.plan import DevicePlanner

    planner, rng = DevicePlanner(placement, limits, directory), np.random.default_rng(1)
    counts_RE = torch.zeros(4, 64, dtype=torch.int32, device="cuda")
    planner(counts_RE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        planner(counts_RE)
    oracle = Oracle(placement, limits, directory)
    oracle(np.zeros((4, 64), np.int32))
    for _ in range(20):
        drawn = draw_counts(rng, 4, 64, "one donor")
        counts_RE.copy_(torch.from_numpy(drawn))
        graph.replay()
        expected = oracle(drawn)
        np.testing.assert_array_equal(planner.rows_ER.cpu().numpy(), expected["rows_ER"])
        np.testing.assert_array_equal(planner.keys_RS.cpu().numpy(), expected["keys_RS"])
