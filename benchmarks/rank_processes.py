"""One process per rank for a part of a benchmark: they import, wait to be told to begin, and are ended when late.

A part in processes of its own cannot spoil another. While one part's processes run, the next one's import torch.
Knows nothing of what runs in them. `pipeline/gpu_overlap.py`, `balance/gpu_elastic.py` and `ep_tables.py` call it.
"""

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from multiprocessing import connection

GRACE_S = 8.0
"""How long a part may overrun its time to print what it has, and ranks outlive one that failed."""


class RankProcesses:
    """`target(rank, store_path, start, *args)` in `ranks` processes; it imports, then takes `until` from `start`."""

    def __init__(self, name, ranks, target, *args):
        context, store_path = multiprocessing.get_context("spawn"), tempfile.mktemp()
        self.name, self._starts = name, [context.Queue() for _ in range(ranks)]
        self._ranks = [
            context.Process(target=guarded, args=(target, name, rank, store_path, start, *args), daemon=True)
            for rank, start in enumerate(self._starts)
        ]
        for process in self._ranks:
            process.start()

    def run(self, until, end):
        """Let it begin nothing new after `until`; end what is left at `end`, or soon after a rank failed.

        Monotonic clock. Returns whether all ended well.
        """
        began, failed = time.monotonic(), False
        for start in self._starts:
            start.put(until)
        while (running := [process for process in self._ranks if process.is_alive()]) and time.monotonic() < end:
            connection.wait([process.sentinel for process in running], max(0.0, end - time.monotonic()))
            if not failed and any(process.exitcode for process in self._ranks):
                failed, end = True, min(end, time.monotonic() + GRACE_S)  # the others report what they make of it
        for rank, process in enumerate(self._ranks):
            if process.is_alive():
                print(f"part {self.name}: rank {rank} is not done after {end - began:.0f} s; ended", flush=True)
                process.kill()
                process.join()
        exits = [process.exitcode for process in self._ranks]
        print(f"===== part {self.name}: {time.monotonic() - began:.0f} s, exits {exits}", flush=True)
        return not any(exits)


def guarded(target, name, rank, *args):
    """In the process: `target`, its error if it has one, and out."""
    code = 0
    try:
        target(rank, *args)
    except BaseException:
        print(f"part {name}, rank {rank} failed:\n{traceback.format_exc(limit=-6)}", flush=True)
        code = 1
    sys.stdout.flush()
    os._exit(code)  # NCCL's and the driver's teardown order differs between versions


def least_left_s(until):
    """Seconds until then, of the rank that has least. Every rank of torch's default group calls."""
    import torch.distributed as dist  # late: who starts the processes needs no torch

    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, until - time.monotonic())
    return min(found)
