"""What the Hopper expert kernel is checked on, from one tile and one step of K up to replays of a graph.

    PYTHONPATH=src:. python -m tests.kernels.experts_cases [NAME ...]

runs the cases in another process that is killed when one hangs, and says where a result first differs.
`test_experts_gpu.py` runs the same cases under pytest.

Shapes: L experts, D hidden, F intermediate, M pairs, P places.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from queue import Empty, Queue

import torch

from bywash.errors import BywashError
from bywash.kernels.experts import HopperExperts, Tuning, compile_experts
from bywash.kernels.experts_naive import experts_naive

HANG_S = 60.0
SMALL = {cluster: Tuning(cluster=cluster, max_n=24) for cluster in (1, 2)}
FULL = {cluster: Tuning(cluster=cluster) for cluster in (1, 2)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Inputs with poison wherever nothing may be read."""

    rows_PD: torch.Tensor
    index_M: torch.Tensor
    ends_L: torch.Tensor
    gate_up_LGD: torch.Tensor
    down_LDF: torch.Tensor


def make_problem(counts, hidden, inner, *, places=None, gather=True, spare=5, padding=0, seed=0):
    """Random weights and rows. Places that no pair reads, columns past D and entries past M hold poison."""
    generator = torch.Generator("cuda").manual_seed(seed)
    pairs = sum(counts)
    places = places or max(pairs, 1) + 3
    index = torch.arange(pairs, device="cuda") % places
    if gather:
        index = torch.randint(0, places, (pairs,), device="cuda", generator=generator)
    rows_PD = torch.full((places, hidden + padding), float("nan"), device="cuda", dtype=torch.bfloat16)
    rows_PD[index.unique(), :hidden] = torch.randn(
        index.unique().numel(), hidden, device="cuda", generator=generator
    ).bfloat16()
    index_M = torch.full((pairs + spare,), 1 << 30, dtype=torch.int32, device="cuda")
    index_M[:pairs] = index.int()

    def weights(*shape):
        return (torch.randn(*shape, device="cuda", generator=generator) * shape[-1] ** -0.5).bfloat16()

    return Problem(
        rows_PD=rows_PD,
        index_M=index_M,
        ends_L=torch.tensor(counts, device="cuda").cumsum(0).int(),
        gate_up_LGD=weights(len(counts), 2 * inner, hidden),
        down_LDF=weights(len(counts), hidden, inner),
    )


def open_experts(problem, tuning, max_blocks=None):
    pairs = problem.index_M.shape[0]
    return HopperExperts(problem.gate_up_LGD, problem.down_LDF, pairs=pairs, tuning=tuning, max_blocks=max_blocks)


def difference(got_MN, wanted_MN):
    """None if equal within what bfloat16 allows, else where and how it differs."""
    wanted = wanted_MN.float()
    size = wanted.square().mean().sqrt().item() if wanted.numel() else 0.0
    wrong = ~((got_MN.float() - wanted).abs() <= 0.012 * wanted.abs() + 0.012 * size)
    if not wrong.any():
        return None
    row, column = wrong.nonzero()[0].tolist()
    rows, columns = (wrong.any(dim).nonzero().flatten().tolist() for dim in (1, 0))
    return (
        f"{int(wrong.sum())} of {wrong.numel()} wrong in {len(rows)} rows and {len(columns)} columns; first at "
        f"[{row}, {column}]: wanted {wanted[row, column]:.5f}, got {got_MN[row, column]:.5f}; "
        f"its row from there: wanted {_some(wanted[row, column:])}, got {_some(got_MN[row, column:].float())}; "
        f"its column from there: got {_some(got_MN[row:, column].float())}; "
        f"blocks of 8 rows {sorted({r // 8 for r in rows})[:40]}, of 8 columns {sorted({c // 8 for c in columns})[:40]}"
    )


def _some(values):
    return [round(value, 3) for value in values[:10].tolist()]


def check_hidden(counts, hidden, inner, tuning, **how):
    """The first stage alone."""
    problem = make_problem(counts, hidden, inner, **how)
    experts = open_experts(problem, tuning)
    experts._h_MF.fill_(float("nan"))
    experts(problem.rows_PD, problem.index_M, problem.ends_L, last=0)
    gate_up = problem.gate_up_LGD.float()
    parts, start = [], 0
    for expert, end in enumerate(problem.ends_L.tolist()):
        x = problem.rows_PD[problem.index_M[start:end].long(), :hidden].float()
        gate, value = (x @ gate_up[expert].T).chunk(2, dim=1)
        parts.append(torch.nn.functional.silu(gate) * value)
        start = end
    return difference(experts._h_MF[:start], torch.cat(parts)) or _untouched(experts._h_MF[start:])


def check_outputs(counts, hidden, inner, tuning, **how):
    """The second stage alone, from an intermediate made here."""
    problem = make_problem(counts, hidden, inner, **how)
    experts, pairs = open_experts(problem, tuning), sum(counts)
    h_MF = torch.randn(pairs, inner, device="cuda").bfloat16()
    experts._h_MF.fill_(float("nan"))[:pairs] = h_MF
    out_MD = torch.full((problem.index_M.shape[0], hidden), float("nan"), dtype=torch.bfloat16, device="cuda")
    experts(problem.rows_PD, problem.index_M, problem.ends_L, out_MD, first=1)
    parts, start = [], 0
    for expert, end in enumerate(problem.ends_L.tolist()):
        parts.append(h_MF[start:end].float() @ problem.down_LDF[expert].float().T)
        start = end
    return difference(out_MD[:pairs], torch.cat(parts)) or _untouched(out_MD[pairs:])


def check_both(counts, hidden, inner, tuning, max_blocks=None, **how):
    """The whole kernel, three times, against the oracle."""
    problem = make_problem(counts, hidden, inner, **how)
    experts = open_experts(problem, tuning, max_blocks=max_blocks)
    for _ in range(3):
        experts._h_MF.fill_(float("nan"))
        wrong = _compare(experts, problem, hidden)
        if wrong:
            return wrong
    left = experts._state.tolist()
    return None if not any(left) else f"counters were left at {left}"


def _compare(experts, problem, hidden):
    pairs = int(problem.ends_L[-1])
    out_MD = torch.full((problem.index_M.shape[0], hidden), float("nan"), dtype=torch.bfloat16, device="cuda")
    experts(problem.rows_PD, problem.index_M, problem.ends_L, out_MD)
    wanted = experts_naive(
        problem.rows_PD[:, :hidden],
        problem.index_M,
        problem.ends_L,
        problem.gate_up_LGD,
        problem.down_LDF,
        round_to=torch.bfloat16,
    )
    return difference(out_MD[:pairs], wanted) or _untouched(out_MD[pairs:])


def _untouched(rest):
    return (
        None if rest.isnan().all() else f"rows past M were written: {rest.isnan().logical_not().nonzero()[:4].tolist()}"
    )


def check_targets(counts, hidden, inner, tuning, share):
    """Outputs with a target are there, with the same bits, and only there; places in between are left alone."""
    problem, pairs = make_problem(counts, hidden, inner), sum(counts)
    experts, generator = open_experts(problem, tuning), torch.Generator("cuda").manual_seed(1)
    usual_MD = experts(problem.rows_PD, problem.index_M, problem.ends_L)[:pairs]
    far = torch.full((2 * pairs, hidden + 8), float("nan"), dtype=torch.bfloat16, device="cuda")
    places_M = torch.randperm(2 * pairs, device="cuda", generator=generator)[:pairs]
    away_M = torch.rand(pairs, device="cuda", generator=generator) < share
    targets_M = torch.full_like(problem.index_M, -16, dtype=torch.int64)  # past M nobody looks
    targets_M[:pairs] = torch.where(away_M, far.data_ptr() + places_M * far.stride(0) * 2, 0)
    out_MD = torch.full((problem.index_M.shape[0], hidden), float("nan"), dtype=torch.bfloat16, device="cuda")
    experts(problem.rows_PD, problem.index_M, problem.ends_L, out_MD, targets_M=targets_M)
    wanted_far, wanted_MD = torch.full_like(far, float("nan")), torch.full_like(out_MD, float("nan"))
    wanted_far[places_M[away_M], :hidden] = usual_MD[away_M]
    wanted_MD[:pairs][~away_M] = usual_MD[~away_M]
    for name, got, wanted in (("targets", far, wanted_far), ("outputs", out_MD, wanted_MD)):
        wrong = got.view(torch.int16) != wanted.view(torch.int16)
        if wrong.any():
            rows = wrong.any(1).nonzero().flatten().tolist()
            return f"{name}: {int(wrong.sum())} values differ, in {len(rows)} of {len(got)} rows: {rows[:20]}"
    experts(problem.rows_PD, problem.index_M, problem.ends_L, out_MD)
    return None if torch.equal(out_MD[:pairs], usual_MD) else "a call without targets still uses those of the last"


def check_replay(tuning):
    """One captured graph, replayed after counts, index and rows changed."""
    hidden, inner, experts_here, most = 256, 192, 5, 900
    problem = make_problem([most, 0, 0, 0, 0], hidden, inner, spare=0)
    experts = open_experts(problem, tuning)
    out_MD = torch.empty(most, hidden, dtype=torch.bfloat16, device="cuda")
    experts(problem.rows_PD, problem.index_M, problem.ends_L, out_MD)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        experts(problem.rows_PD, problem.index_M, problem.ends_L, out_MD)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        counts = torch.randint(0, most // experts_here + 1, (experts_here,), generator=generator)
        counts *= torch.randint(0, 3, (experts_here,), generator=generator) > 0
        problem.ends_L.copy_(counts.cumsum(0).int())
        problem.index_M.copy_(torch.randint(0, most, (most,), generator=generator).int())
        problem.rows_PD[:] = torch.randn(problem.rows_PD.shape, generator=generator).bfloat16()
        out_MD.fill_(float("nan"))
        graph.replay()
        wanted = experts_naive(
            problem.rows_PD,
            problem.index_M,
            problem.ends_L,
            problem.gate_up_LGD,
            problem.down_LDF,
            round_to=torch.bfloat16,
        )
        pairs = int(counts.sum())
        wrong = difference(out_MD[:pairs], wanted) or _untouched(out_MD[pairs:])
        if wrong:
            return f"replay {seed}, counts {counts.tolist()}: {wrong}"
    return None


def check_independence(tuning):
    """A row's bits are the same alone and among any number of others, wherever it stands."""
    hidden, inner = 512, 256
    problem = make_problem([700], hidden, inner, gather=False)
    experts, places = open_experts(problem, tuning), torch.randperm(700, device="cuda").int()
    all_MD = experts(problem.rows_PD, problem.index_M[:700].contiguous(), problem.ends_L)
    for count in (1, 2, 7, 8, 9, 31, 40, 100, 129, 257, 320, 321, 399, 641):
        ends_L = torch.tensor([count], dtype=torch.int32, device="cuda")
        some_MD = experts(problem.rows_PD, places[:count].contiguous(), ends_L)
        if not torch.equal(some_MD, all_MD[places[:count].long()]):
            wrong = (some_MD != all_MD[places[:count].long()]).any(1).nonzero().flatten().tolist()
            return f"{count} rows: other bits in rows {wrong[:20]}"
    return None


def check_tunings():
    """All tunings give the same bits, so that ranks which tune for other numbers of rows agree."""
    problem, results = make_problem(SKEWED, 7168, 2048, places=300), {}
    for tuning in (*SMALL.values(), *FULL.values()):
        experts = open_experts(problem, tuning)
        results[tuning] = experts(problem.rows_PD, problem.index_M, problem.ends_L)[: sum(SKEWED)]
    usual = results[FULL[2]]
    for tuning, y_MD in results.items():
        if not torch.equal(y_MD, usual):
            return f"{tuning} and {FULL[2]}: {difference(y_MD, usual) or f'{int((y_MD != usual).sum())} bits'}"
    return None


def check_reports(tuning):
    """Ends and places out of bounds are reported and break nothing, not even the next call."""
    hidden, inner, counts = 256, 192, [40, 0, 30, 17]
    problem = make_problem(counts, hidden, inner, spare=0)
    experts, index_M, ends = open_experts(problem, tuning), problem.index_M, problem.ends_L.tolist()
    bad_ends = ([40, 40, 70, 1 << 30], [40, 20, 70, 87], [-1, 40, 70, 87], [88, 88, 88, 88])
    calls = [(index_M, torch.tensor(bad, dtype=torch.int32, device="cuda"), "ends") for bad in bad_ends]
    for place in (-1, 1 << 30, problem.rows_PD.shape[0]):
        bad_M = index_M.clone()
        bad_M[45] = place
        calls.append((bad_M, problem.ends_L, "place"))
    for bad_M, bad_L, said in calls:
        experts(problem.rows_PD.nan_to_num(), bad_M, bad_L)
        try:
            experts.check()
            return f"not reported: ends {bad_L.tolist()}, index up to {int(bad_M.max())}"
        except BywashError as error:
            if said not in str(error):
                return f"ends {bad_L.tolist()}, index up to {int(bad_M.max())}: said {error}"
        wrong = _compare(experts, problem, hidden)
        if wrong:
            return f"after ends {bad_L.tolist()} instead of {ends}: {wrong}"
        experts.check()
    return None


SKEWED = [0, 1, 0, 333, 8, 0, 17, 260, 0, 0, 5, 64, 129, 700, 0]


def _cases():
    for cluster in (1, 2):
        small, full = SMALL[cluster], FULL[cluster]
        name = f"cluster{cluster}"
        yield f"{name}: h, one tile, one step", check_hidden, ([8], 64, 128, small), {"gather": False}
        yield f"{name}: h, two steps", check_hidden, ([8], 128, 128, small), {"gather": False}
        yield f"{name}: h, more steps than stages", check_hidden, ([8], 640, 128, small), {"gather": False}
        yield f"{name}: h, 24 tokens a block", check_hidden, ([24 * cluster], 640, 128, small), {"gather": False}
        yield f"{name}: h, gathered, several tiles", check_hidden, ([40, 3, 100], 640, 512, small), {}
        yield f"{name}: h, full tiles", check_hidden, ([150 * cluster, 160 * cluster], 640, 512, full), {}
        yield f"{name}: y, one tile, one step", check_outputs, ([8], 256, 64, small), {}
        yield f"{name}: y, several", check_outputs, ([40, 3, 100], 768, 640, small), {}
        yield f"{name}: y, full tiles", check_outputs, ([150 * cluster, 160 * cluster], 768, 640, full), {}
        yield f"{name}: both, one expert", check_both, ([100], 256, 256, full), {}
        yield f"{name}: both, odd sizes", check_both, ([31, 1, 77], 72, 40, full), {"padding": 24}
        yield f"{name}: both, nobody", check_both, ([0, 0, 0], 128, 128, full), {}
        yield f"{name}: both, skewed", check_both, (SKEWED, 512, 384, full), {"places": 300}
        yield f"{name}: both, many experts", check_both, (list(range(1, 97)), 1024, 512, full), {"places": 1000}
        yield f"{name}: both, DeepSeek's sizes", check_both, ([250, 270, 0, 3], 7168, 2048, full), {"places": 400}
        yield f"{name}: both, few blocks", check_both, (SKEWED, 512, 384, full), {"max_blocks": 7}
        yield f"{name}: targets, some", check_targets, ([31, 1, 0, 77, 333], 264, 136, full, 0.5), {}
        yield f"{name}: targets, all, small tiles", check_targets, (SKEWED, 520, 384, small, 1.0), {}
        yield f"{name}: targets, DeepSeek's sizes", check_targets, ([250, 270, 0, 3], 7168, 2048, full, 0.5), {}
        yield f"{name}: bad input", check_reports, (full,), {}
        yield f"{name}: replays", check_replay, (full,), {}
        yield f"{name}: a row's bits", check_independence, (full,), {}
    yield "every tuning: the same bits", check_tunings, (), {}


CASES: dict[str, Callable[[], str | None]] = {
    name: lambda check=check, arguments=arguments, how=how: check(*arguments, **how)
    for name, check, arguments, how in _cases()
}


def work(names):
    """Print one line per case. Compiles first, in parallel, so that no case waits for it."""
    compile_all([*SMALL.values(), *FULL.values()])
    print("ready", flush=True)
    for name in names:
        try:
            torch.manual_seed(0)
            wrong = CASES[name]()
            torch.cuda.synchronize()
            print(f"{'WRONG' if wrong else 'ok   '} {name}" + (f": {wrong}" if wrong else ""), flush=True)
        except Exception as error:  # a broken context cannot go on: say so and end
            print(f"ERROR {name}: {type(error).__name__}: {str(error)[:600]}", flush=True)
            if "CUDA" in str(error) or "experts hopper" in str(error):
                return


def compile_all(tunings):
    """Fill the cache of compiled kernels, side by side."""
    with ProcessPoolExecutor(len(tunings), mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_experts, tunings))


def watch(names):
    """Run the cases in a process of their own; one that hangs or breaks the context costs only itself."""
    failed = 0
    while names:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.experts_cases", "--work", *names],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        lines: Queue[str] = Queue()
        reader = threading.Thread(target=lambda p=process, q=lines: [q.put(line) for line in p.stdout], daemon=True)
        reader.start()
        names, hung = _follow(process, lines, names)
        failed += hung
    return failed


def _follow(process, lines, names):
    """Print what the process says; the names still to do, and how many failed."""
    failed, deadline, left, told = 0, time.monotonic() + 4 * HANG_S, list(names), False
    while left:
        try:
            line = lines.get(timeout=0.5).rstrip()
        except Empty:
            if process.poll() is not None and lines.empty():
                if told:
                    return left, failed
                print(f"ERROR {left[0]}: the process ended with {process.returncode}", flush=True)
                return left[1:], failed + 1
            if time.monotonic() > deadline:
                process.kill()
                print(f"HANG  {left[0]}: killed after {HANG_S:.0f} s", flush=True)
                return left[1:], failed + 1
            continue
        print(line, flush=True)
        if line[:5] in ("ok   ", "WRONG", "ERROR") or line == "ready":
            deadline = time.monotonic() + HANG_S
        if line[6:].startswith(left[0]):
            failed, told = failed + (line[:2] != "ok"), line.startswith("ERROR")
            left = left[1:]
    process.wait(timeout=HANG_S)
    return left, failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2:])
    else:
        chosen = [name for name in CASES if not sys.argv[1:] or any(part in name for part in sys.argv[1:])]
        sys.exit(watch(chosen) > 0)
