"""Several hosts on one switch: network namespaces, each with a link of one rate to a bridge in a namespace of its own.

The link is limited both ways by `tc tbf`; towards the host the switch holds at most `queue_kb`, and drops what comes on
top of it. So several senders that meet at one host lose packets, as at a switch with a shallow buffer and no PFC.
Real: the kernels' TCP and queues. Not real: separate machines, RoCE. Needs root.
"""

import os
import subprocess

from tests.hosts.network import VETH, ip


class Star:
    """`hosts` hosts named host-0, host-1, ..., with what `Cluster` asks of a network."""

    def __init__(self, hosts, rate_mbps, queue_kb):
        self.spaces = [f"bywash-{os.getpid()}-star{host}" for host in range(hosts)]
        self._switch = f"bywash-{os.getpid()}-switch"
        try:
            ip("netns", "add", self._switch)
            ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", self._switch, "link", "set", "bridge", "up")
            for host, space in enumerate(self.spaces):
                self._plug_in(host, space, rate_mbps, queue_kb)
        except BaseException:
            self.close()
            raise

    def _plug_in(self, host, space, rate_mbps, queue_kb):
        port = f"port{host}"
        ip("netns", "add", space)
        ip("-n", space, "link", "set", "lo", "up")
        ip("link", "add", VETH, "netns", space, "type", "veth", "peer", "name", port, "netns", self._switch)
        ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
        ip("-n", space, "address", "add", f"{self.address(host, VETH)}/24", "dev", VETH)
        ip("-n", space, "link", "set", VETH, "up")
        for where, device, held in ((self._switch, port, f"{queue_kb}kb"), (space, VETH, "4mb")):
            tc = ["tc", "-n", where, "qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{rate_mbps}mbit"]
            subprocess.run([*tc, "burst", "32kb", "limit", held], check=True)

    def congestion_control(self, name):
        """Which one TCP is to use, as the kernel names it."""
        for space in self.spaces:
            setting = f"net.ipv4.tcp_congestion_control={name}"
            subprocess.run(["ip", "netns", "exec", space, "sysctl", "-qw", setting], check=True)

    @staticmethod
    def address(host, cable):
        """A host's address; all have one cable."""
        return f"10.214.{(VETH,).index(cable)}.{host + 1}"

    @staticmethod
    def hostname(host):
        """What a host calls itself."""
        return f"host-{host}"

    def close(self):
        for space in [*self.spaces, self._switch]:
            subprocess.run(["ip", "netns", "del", space], stderr=subprocess.DEVNULL)
