"""The launcher of all hosts for tests: imports once, then forks a rank for each line on its input, and prints its pid.

A line is a JSON object: `space` and `hostname` of the rank's host, `env`, `job` (a function of `tests.hosts.jobs`),
`arguments`, `deadline_s`, and `out`, the file for what the job returns or the error that it ends with.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

import torch

from bywash.errors import BywashError
from bywash.launch import run_under_torchrun, under_torchrun
from tests.hosts import jobs
from tests.hosts.relay import enter

_NEW_HOST_NAME = 0x04000000
PRELOADED = ("torch.distributed", "bywash.models.job", "transformers.modeling_utils", "transformers.generation")


def serve():
    for module in PRELOADED:
        import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped at once
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            be_rank(request)
        print(pid, flush=True)


def move_to(space, hostname):
    """Make this process, which has one thread, one of a host."""
    enter(space)
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_HOST_NAME):
        raise OSError(ctypes.get_errno(), "unshare of the host name")
    socket.sethostname(hostname)


def be_rank(request):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    out = Path(request["out"])
    log = os.open(f"{out}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    move_to(request["space"], request["hostname"])
    os.environ.update(request["env"])
    torch.set_num_threads(1)
    results = []

    def main(arguments, rank, ranks, store):
        results.append(getattr(jobs, request["job"])(rank, ranks, store, request["deadline_s"], **arguments))

    answer = {}
    try:
        assert under_torchrun()
        run_under_torchrun(main, request["arguments"], None, request["deadline_s"])
        answer["result"] = results[0]
    except BywashError as error:
        answer.update(error=type(error).__name__, text=str(error), ranks=list(getattr(error, "ranks", ())))
    except BaseException:
        answer["crash"] = traceback.format_exc()
    answer["ended"] = time.monotonic()
    out.with_suffix(".part").write_text(json.dumps(answer))
    out.with_suffix(".part").rename(out)
    os._exit(0)


if __name__ == "__main__":
    serve()
