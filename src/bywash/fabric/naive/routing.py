"""Which of several equal ports a packet takes: by hash, sprayed, least loaded, or with its flowlet."""

from bywash.fabric import inputs
from bywash.fabric.layout import FLOWLET_SLOTS
from bywash.fabric.naive.network import Network
from bywash.fabric.naive.parts import Packet

_M32 = 0xFFFFFFFF


def route(net: Network, node: int, packet: Packet) -> int:
    """The port that a packet leaves a switch by."""
    ways = net.routes.candidates(node, packet.to)
    routing = net.s.routing
    if len(ways) == 1:
        return ways[0]
    seed = inputs.node_seed(net.s, node)
    if routing.mode == "ecmp" or packet.kind != "data":
        if routing.hash == "murmur-ns3":
            return ways[_murmur(packet, seed) % len(ways)]
        return ways[_mix(packet.entropy ^ seed) * len(ways) >> 32]
    if routing.mode == "spray":
        mixed = (packet.entropy ^ packet.psn * 0x9E3779B1) & _M32
        return ways[_mix(mixed ^ seed) * len(ways) >> 32]
    if routing.mode == "adaptive":
        return _least_loaded(net, node, ways, packet.queue)
    slot = node * FLOWLET_SLOTS + ((packet.entropy ^ packet.entropy >> 10) & (FLOWLET_SLOTS - 1))
    last, entropy, port = net.flowlets.get(slot, (-1, -1, -1))
    if entropy != packet.entropy or net.now - last > round(routing.flowlet_gap_us * 1e6):
        port = _least_loaded(net, node, ways, packet.queue)
    net.flowlets[slot] = (net.now, packet.entropy, port)
    return port


def _least_loaded(net: Network, node: int, ways: list[int], number: int) -> int:
    turn = net.turn[node] % len(ways)
    net.turn[node] += 1

    def cost(way: int) -> tuple[bool, int]:
        queues = net.ports[way].queues
        return queues[number].paused, sum(queue.egress for queue in queues)

    return min(ways[turn:] + ways[:turn], key=cost)


def _mix(h: int) -> int:
    h &= _M32
    h = ((h ^ h >> 16) * 0x85EBCA6B) & _M32
    h = ((h ^ h >> 13) * 0xC2B2AE35) & _M32
    return h ^ h >> 16


def _murmur(packet: Packet, seed: int) -> int:
    """MurmurHash3-32 with the HPCC simulator's round."""
    sport = 10000 + (packet.entropy >> 17)
    ports = sport | 100 << 16 if packet.kind == "data" else 100 | sport << 16
    h = seed & _M32
    for host in (packet.entropy & 0x1FFFF, packet.to, None):
        k = ports if host is None else 0x0B000001 + (host // 256 << 16) + (host % 256 << 8)
        k = k * 0xCC9E2D51 & _M32
        k = (k << 15 | k >> 17) & _M32
        h ^= k * 0x1B873593 & _M32
        h = (h << 13 | h >> 19) & _M32
        h = h + (h << 2) + 0xE6546B64 & _M32
    h ^= 12
    h = ((h ^ h >> 16) * 0x85EBCA6B) & _M32
    h = ((h ^ h >> 13) * 0xC2B2AE35) & _M32
    return h ^ h >> 16
