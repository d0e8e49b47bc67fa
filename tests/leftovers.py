"""What a job takes of its machine: ports, and what it may leave when it ends badly; for tests that look at both."""

import os
import random
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

PATIENCE_S = 60.0


def free_port():
    """A port to listen on. Not one of those that the kernel gives to whoever asks for any, often at this moment."""
    dice = random.Random(os.getpid() ^ time.monotonic_ns())
    while True:
        port = dice.randrange(20_000, 28_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def left_behind():
    """Named shared memory, and the abstract sockets of bywash, on this machine."""
    sockets = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@bywash-" in line]
    return {*sockets, *os.listdir("/dev/shm")}


def assert_nothing_new(before):
    """Another job of this machine may hold a socket or a file for a while, and a killed process dies when it is next
    run; what a job has forgotten stays.
    """
    end = time.monotonic() + PATIENCE_S
    while not left_behind() <= before and time.monotonic() < end:
        time.sleep(0.1)
    assert left_behind() <= before


def assert_gone(pids):
    """None of these processes lives, or is about to be gone."""
    end = time.monotonic() + PATIENCE_S
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [pid for pid in pids if alive(pid)]


def end_all(pids):
    """SIGKILL to those that have not ended by themselves meanwhile."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def alive(pid):
    """Whether it runs or is stopped; one that has ended and is not yet reaped is gone."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
