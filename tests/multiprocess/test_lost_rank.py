"""A rank of a running job is killed or stopped: the others end by themselves, in time, naming it; nothing is left."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

DEADLINE_S = 4
RANKS = 4


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
    return sorted(p for p in children_of(pid) if len(list(Path(f"/proc/{p}/task").iterdir())) > 1)


def start(launcher, port):
    options = ["--ranks", str(RANKS)] if launcher == "local" else []
    command = [sys.executable, "-m", "bywash"]
    if launcher == "torchrun":
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--master-port", str(port)]
        command = [sys.executable, *torchrun, "-m", "bywash"]
    command += ["run", "--model", "qwen3-moe-tiny", *options, "--tokens", "900", "--deadline", str(DEADLINE_S)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1)


def wait_for(job, text):
    lines = []
    for line in job.stdout:
        lines.append(line)
        if text in line:
            return
    raise AssertionError("the job ended early:\n" + "".join(lines))


def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("launcher", ["local", "torchrun"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_the_others_end_in_time_and_name_the_lost_rank(launcher, how):
    before = sorted(os.listdir("/dev/shm"))
    job = start(launcher, free_port())
    try:
        wait_for(job, "generating")
        time.sleep(0.5)
        ranks = ranks_of(job.pid)
        victim = ranks[-1]
        survivors = [pid for pid in ranks if pid != victim]
        os.kill(victim, how)
        began = time.monotonic()
        while any(Path(f"/proc/{pid}").exists() for pid in survivors) and time.monotonic() - began < 60:
            time.sleep(0.05)
        took = time.monotonic() - began
        if launcher == "torchrun":
            # Its agent would wait half a minute for the stopped process; the ranks themselves are done.
            os.kill(victim, signal.SIGKILL) if Path(f"/proc/{victim}").exists() else None
        output = job.stdout.read()
        assert job.wait(timeout=60) != 0
    finally:
        for pid in [*children_of(job.pid), job.pid]:
            os.kill(pid, signal.SIGKILL) if Path(f"/proc/{pid}").exists() else None
        job.wait()
    # What each survivor says it waited is the promise; when its process is gone depends on the machine's load too, but
    # not so much that it could be another's patience (torchrun's half a minute, gloo's half an hour).
    waits = [float(text) for text in re.findall(r"\(waited ([\d.]+) s of", output)]
    assert max(waits, default=0) <= DEADLINE_S + 2, output
    assert took <= 20, output
    if not (launcher == "torchrun" and how == signal.SIGKILL):  # there the agent ends the survivors first
        words = "is gone|was killed by SIGKILL" if how == signal.SIGKILL else r"is stopped \(SIGSTOP\)"
        assert re.search(rf"rank \d \(pid {victim}\) ({words})", output), output
        assert launcher == "torchrun" or "Traceback" not in output  # torchrun's agent prints one of its own
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert sorted(os.listdir("/dev/shm")) == before
