"""Strangers at the socket, and heaps that hold what their owner wrote."""

import json
import os
import socket
import threading

from bywash.memory import Heap, open_heaps
from bywash.memory.rendezvous import _read_hello


def stamped(group):
    heaps = open_heaps(group, 4096, arithmetic="a page", facts={"x": 1})
    for rank, heap in enumerate(heaps):
        heap.buffer[group.rank] = 100 + 10 * group.rank + rank
    group.share("written", "stamping the heaps")
    return [list(heap.buffer[: group.ranks]) for heap in heaps]


def test_everyone_maps_everyones_heap(pools):
    wanted = [[100 + 10 * writer + owner for writer in range(3)] for owner in range(3)]
    assert pools(3).run(stamped) == [wanted] * 3


def knock(name, packet, descriptors):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(name)
        socket.send_fds(peer, [packet], descriptors)


def answers_to(packet, descriptors=()):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        name = b"\0bywash-test-" + os.urandom(8).hex().encode()
        listener.bind(name)
        listener.listen(1)
        thread = threading.Thread(target=knock, args=(name, packet, list(descriptors)))
        thread.start()
        accepted = listener.accept()[0]
        thread.join()
        with accepted:
            return _read_hello(accepted, "secret")


def test_only_a_packet_with_the_secret_is_taken():
    good = json.dumps({"rank": 1, "token": "secret", "error": ""}).encode()
    assert answers_to(good) == ({"rank": 1, "token": "secret", "error": ""}, [])
    assert answers_to(json.dumps({"rank": 1, "token": "guess"}).encode()) == (None, [])
    assert answers_to(json.dumps({"rank": 1}).encode()) == (None, [])
    assert answers_to(b"not json") == (None, [])


def test_a_descriptor_from_a_stranger_is_handed_back_to_be_closed():
    descriptor = Heap.create(4096)
    hello, received = answers_to(json.dumps({"rank": 1, "token": "guess"}).encode(), [descriptor])
    os.close(descriptor)
    assert hello is None
    assert len(received) == 1
    os.close(received[0])
