"""Two hosts on one machine: network namespaces with two cables between them, made and removed by a test.

One cable is a veth pair, whose rate `tc tbf` can limit and whose ends can be set down; the other is two TUN devices and
a relay process, which can delay and lose packets (netem is not in every kernel). Each host has its own host name.
Nothing leaves the namespaces. Needs root.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

VETH, RELAYED = "net0", "net1"
HEADERS_BYTES = 14 + 20 + 32
"""Ethernet, IPv4 and TCP with timestamps, of each packet that the counters count."""
SEGMENT_BYTES = 1448
"""Payload of a full packet."""


def why_not():
    """Why hosts cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]:
        return f"needs {', '.join(missing)}"
    if not Path("/dev/net/tun").exists():
        return "needs /dev/net/tun"
    name = f"bywash-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"network namespaces are not permitted: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


def skip_without_hosts():
    reason = why_not()
    if reason:
        pytest.skip(reason)


class TwoHosts:
    """Hosts `a` and `b` with two cables: net0 is the veth pair, net1 goes through the relay.

    Attributes:
        spaces: the names of their network namespaces.
    """

    names = ("a", "b")

    def __init__(self):
        self.spaces = [f"bywash-{os.getpid()}-{name}" for name in self.names]
        self._relay = None
        try:
            for space in self.spaces:
                ip("netns", "add", space)
                ip("-n", space, "link", "set", "lo", "up")
            a, b = self.spaces
            ip("link", "add", VETH, "netns", a, "type", "veth", "peer", "name", VETH, "netns", b)
            relay = [sys.executable, "-m", "tests.hosts.relay", RELAYED, *self.spaces]
            self._relay = subprocess.Popen(relay, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert self._relay.stdout.readline() == "ready\n"
            for host, space in enumerate(self.spaces):
                for cable in (VETH, RELAYED):
                    ip("-n", space, "address", "add", f"{self.address(host, cable)}/24", "dev", cable)
                    ip("-n", space, "link", "set", cable, "up")
        except BaseException:
            self.close()
            raise

    @staticmethod
    def address(host, cable):
        """A host's address on a cable."""
        return f"10.213.{(VETH, RELAYED).index(cable)}.{host + 1}"

    def hostname(self, host):
        """What a host calls itself."""
        return f"host-{self.names[host]}"

    def close(self):
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], stderr=subprocess.DEVNULL)

    def command(self, host, *command):
        """`command`, to be run on a host (0 or 1)."""
        script = f'hostname {self.hostname(host)} && exec "$@"'
        return ["ip", "netns", "exec", self.spaces[host], "unshare", "--uts", "sh", "-c", script, "sh", *command]

    def limit(self, rate_mbps):
        """Limit the veth's rate in both directions."""
        for space in self.spaces:
            rate = f"{rate_mbps}mbit"
            tc = ["tc", "-n", space, "qdisc", "replace", "dev", VETH, "root", "tbf", "rate", rate]
            subprocess.run([*tc, "burst", "128kb", "limit", "4mb"], check=True)

    def disturb(self, *, delay_ms=0, loss=0.0):
        """Delay every packet on the relayed cable and lose a share of them."""
        self._relay.stdin.write(f"{delay_ms} {loss}\n")
        self._relay.stdin.flush()
        assert self._relay.stdout.readline() == "ready\n"

    def plug(self, *, up):
        """Pull the veth cable, or put it back."""
        ip("-n", self.spaces[0], "link", "set", VETH, "up" if up else "down")


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True)


def segments_again():
    """TCP segments that this process's host has sent more than once."""
    names, values = (
        line.split() for line in Path("/proc/self/net/snmp").read_text().splitlines() if line[:4] == "Tcp:"
    )
    return int(values[names.index("RetransSegs")])


def counters():
    """(bytes, packets) that this process's host has sent over the veth."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == VETH:
            numbers = fields.split()
            return int(numbers[8]), int(numbers[9])
    raise AssertionError(f"no {VETH} on this host")
