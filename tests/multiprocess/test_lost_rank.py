"""A rank of a running job is killed or stopped: the others end by themselves, in time, naming it; nothing is left."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.leftovers import alive, assert_gone, assert_nothing_new, end_all, free_port, left_behind

DEADLINE_S = {"local": 6, "torchrun": 15}
"""More than ranks may come apart: under torchrun each of them imports everything, on a machine that may be busy."""
RANKS = 3
HANG_S = 100
"""Survivors that are still there then wait for something else: gloo's half an hour, say."""


def children_of(pid):
    """Every process below `pid`, from the process table."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, queue = [], [pid]
    while queue:
        found += parents.get(queue[0], [])
        queue += parents.get(queue.pop(0), [])
    return found


def ranks_of(pid):
    """The rank processes below a job: the ones with threads, since gloo and the store have some."""
    found = []
    for child in children_of(pid):
        with suppress(OSError):  # gone meanwhile
            found += [child] if len(os.listdir(f"/proc/{child}/task")) > 1 else []
    return sorted(found)


def start(launcher, port):
    options = ["--ranks", str(RANKS)] if launcher == "local" else []
    command = [sys.executable, "-m", "bywash"]
    if launcher == "torchrun":
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--master-port", str(port)]
        command = [sys.executable, *torchrun, "-m", "bywash"]
    command += [
        "run",
        "--model",
        "qwen3-moe-tiny",
        *options,
        "--tokens",
        "900",
        "--deadline",
        str(DEADLINE_S[launcher]),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1)


def wait_for(job, text):
    lines = []
    for line in job.stdout:
        lines.append(line)
        if text in line:
            return
    raise AssertionError("the job ended early:\n" + "".join(lines))


@pytest.mark.parametrize("launcher", ["local", "torchrun"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_the_others_end_in_time_and_name_the_lost_rank(launcher, how):
    before = left_behind()
    job = start(launcher, free_port())
    try:
        wait_for(job, "generating")
        time.sleep(0.5)
        ranks = ranks_of(job.pid)
        victim = ranks[-1]
        survivors = [pid for pid in ranks if pid != victim]
        os.kill(victim, how)
        end = time.monotonic() + HANG_S
        while any(map(alive, survivors)) and time.monotonic() < end:
            time.sleep(0.05)
        hung = [pid for pid in survivors if alive(pid)]
        end_all(hung)  # so that the output below ends
        if launcher == "torchrun":
            end_all([victim])  # its agent would wait half a minute for the stopped process; the ranks are done
        output = job.stdout.read()
        assert job.wait(timeout=60) != 0
    finally:
        end_all([*children_of(job.pid), job.pid])
        job.wait()
    # What each survivor says it waited is the promise, but for what other work on the machine adds to it.
    waits = [float(text) for text in re.findall(r"\(waited ([\d.]+) s of", output)]
    assert max(waits, default=0) <= 2 * DEADLINE_S[launcher], output
    assert not hung, output
    if not (launcher == "torchrun" and how == signal.SIGKILL):  # there the agent ends the survivors first
        words = "is gone|was killed by SIGKILL" if how == signal.SIGKILL else r"is stopped \(SIGSTOP\)"
        assert re.search(rf"rank \d \(pid {victim}\) ({words})", output), output
        assert launcher == "torchrun" or "Traceback" not in output  # torchrun's agent prints one of its own
    assert_gone(ranks)
    assert_nothing_new(before)
