"""Hosts with ranks, by default two with two each: starts jobs on them, ends ranks, collects what became of them."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

from tests.hosts.network import VETH, TwoHosts
from tests.leftovers import end_all
from tests.ranks import DEADLINE_S

PER_HOST = 2
ANSWER_S = 100.0


class Cluster:
    """Hosts, cables and the launcher of ranks. `network` owns the cables: limit, disturb, plug."""

    _numbers = count()

    def __init__(self, directory, network=None, per_host=PER_HOST):
        self.directory, self.per_host = directory, per_host
        self.network = network or TwoHosts()
        self.ranks = per_host * len(self.network.spaces)
        command = [sys.executable, "-m", "tests.hosts.agent"]
        self._agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert self._agent.stdout.readline() == "ready\n"
        except BaseException:
            self.close()
            raise

    def start(self, job, *, deadline_s=DEADLINE_S, cable=VETH, environ=None, **arguments):
        """Start a job of `tests.hosts.jobs` on all ranks; `environ(rank)` adds to a rank's environment."""
        number = next(self._numbers)
        pids, outs = [], []
        for rank in range(self.ranks):
            host, local = divmod(rank, self.per_host)
            env = {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.ranks),
                "LOCAL_RANK": str(local),
                "GROUP_RANK": str(host),
                "MASTER_ADDR": self.network.address(0, cable),
                "MASTER_PORT": str(29_000 + number),
                **(environ(rank) if environ else {}),
            }
            outs.append(Path(self.directory) / f"job{number}-rank{rank}.json")
            request = {
                "space": self.network.spaces[host], "hostname": self.network.hostname(host), "env": env, "job": job,
                "arguments": arguments, "deadline_s": deadline_s, "out": str(outs[-1]),
            }  # fmt: skip
            self._agent.stdin.write(json.dumps(request) + "\n")
            self._agent.stdin.flush()
            pids.append(int(self._agent.stdout.readline()))
        return Job(pids, outs)

    def run(self, job, *, timeout_s=ANSWER_S, **options):
        """Start a job and return every rank's result; fails with what went wrong."""
        answers = self.start(job, **options).answers(timeout_s=timeout_s)
        assert all("result" in answer for answer in answers), answers
        return [answer["result"] for answer in answers]

    def close(self):
        self._agent.kill()
        self._agent.wait()
        self.network.close()


class Job:
    """Ranks of one job, by rank."""

    def __init__(self, pids, outs):
        self.pids, self._outs = pids, outs

    def kill(self, ranks, how=signal.SIGKILL):
        for rank in ranks:
            os.kill(self.pids[rank], how)

    def answers(self, ranks=None, timeout_s=ANSWER_S):
        """What `ranks` (all of them) have to say in the end; the others are ended."""
        ranks = range(len(self.pids)) if ranks is None else ranks
        end = time.monotonic() + timeout_s
        try:
            while any(not self._outs[rank].exists() for rank in ranks):
                if time.monotonic() > end:
                    left = [rank for rank in ranks if not self._outs[rank].exists()]
                    logs = {rank: Path(f"{self._outs[rank]}.log").read_text()[-2000:] for rank in left}
                    raise AssertionError(f"ranks {left} did not end within {timeout_s} s: {logs}")
                time.sleep(0.05)
        finally:
            end_all(self.pids)
        answers = [json.loads(self._outs[rank].read_text()) for rank in ranks]
        assert not any("crash" in answer for answer in answers), answers
        return answers

    def wait_for(self, path, timeout_s=ANSWER_S):
        """Until a rank has made this file."""
        end = time.monotonic() + timeout_s
        while not path.exists():
            assert time.monotonic() < end, [out.read_text() for out in self._outs if out.exists()]
            time.sleep(0.02)
