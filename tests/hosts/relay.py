"""A cable that delays and loses packets: two TUN devices, one in each namespace, and this process between them.

`python -m tests.hosts.relay DEVICE SPACE SPACE`; each line on its input is "DELAY_MS LOSS", answered with "ready".
"""

import ctypes
import fcntl
import heapq
import os
import random
import selectors
import struct
import sys
import time
from contextlib import suppress

_TUNSETIFF, _TUN, _NO_HEADER, _NEW_NETWORK = 0x400454CA, 0x0001, 0x1000, 0x40000000
_MOST_WAITING = 2000
"""Packets on the way; more are lost, as in a switch."""


def enter(space):
    """Move this thread into a network namespace."""
    with open(f"/run/netns/{space}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"setns {space}")


def open_tun(name, space):
    """A TUN device in a namespace; this process then lives there."""
    enter(space)
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH", name.encode(), _TUN | _NO_HEADER))
    os.set_blocking(tun, False)
    return tun


def main(name, *spaces):
    tuns = [open_tun(name, space) for space in spaces]
    dice, delay_s, loss, number = random.Random(7), 0.0, 0.0, 0
    waiting = []
    selector = selectors.DefaultSelector()
    for tun, other in zip(tuns, reversed(tuns)):
        selector.register(tun, selectors.EVENT_READ, other)
    selector.register(sys.stdin, selectors.EVENT_READ, None)
    print("ready", flush=True)
    while True:
        wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for key, _ in selector.select(wait_s):
            if key.data is None:
                line = sys.stdin.readline()
                if not line:
                    return
                delay_s, loss = float(line.split()[0]) / 1e3, float(line.split()[1])
                print("ready", flush=True)
                continue
            packet = os.read(key.fd, 65536)
            if dice.random() >= loss and len(waiting) < _MOST_WAITING:
                number += 1
                heapq.heappush(waiting, (time.monotonic() + delay_s, number, key.data, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, tun, packet = heapq.heappop(waiting)
            with suppress(OSError):  # the device is down, or its queue is full: lost
                os.write(tun, packet)


if __name__ == "__main__":
    main(*sys.argv[1:])
