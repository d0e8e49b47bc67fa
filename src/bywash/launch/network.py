"""Which network interface of this host leads to another host.

gloo otherwise takes the address that the host's own name stands for, on many machines 127.0.1.1, and ranks of other
hosts then cannot connect. Launchers call it; knows nothing of ranks.
"""

import fcntl
import ipaddress
import socket
import struct

_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B


def interface_towards(host: str) -> tuple[str, ipaddress.IPv4Interface] | None:
    """(name, address) of the interface by which this host reaches `host`, itself included; None if there is none.

    Nothing is sent: the kernel is asked for the route.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            source = probe.getsockname()[0]
    except OSError:
        return None
    for _, name in socket.if_nameindex():
        address, mask = _ask(name, _SIOCGIFADDR), _ask(name, _SIOCGIFNETMASK)
        if address == source and mask is not None:
            return name, ipaddress.IPv4Interface(f"{address}/{mask}")
    return None


def _ask(name: str, request: int) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, request, struct.pack("256s", name.encode()[:15]))
        except OSError:  # an interface without an IPv4 address
            return None
    return socket.inet_ntoa(answer[20:24])
