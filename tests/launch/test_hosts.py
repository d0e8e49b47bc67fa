"""What the start-up check finds on hosts that do not fit together: cards in, texts out."""

import ipaddress
from dataclasses import replace

import pytest

from bywash.exchange import HostMap
from bywash.launch.hosts import HostCard, examine, own_card, source_hash
from bywash.launch.network import interface_towards


def cards(hosts="aabb", **changes):
    """Cards of ranks on `hosts`, in order; `changes` are {rank: value} by field."""
    where = HostMap.of(hosts)
    found = [
        HostCard(
            host=name, code="0.1.0 (11112222)", python="3.12.1", torch="2.13.0", local_rank=where.index_R[rank],
            node=where.host_R[rank], network=f"10.0.{where.index_R[rank]}.0/24", clock_s=1000.0,
        )
        for rank, name in enumerate(hosts)
    ]  # fmt: skip
    for field, values in changes.items():
        for rank, value in values.items():
            found[rank] = replace(found[rank], **{field: value})
    return found


def findings(hosts="aabb", **changes):
    return examine(cards(hosts, **changes), HostMap.of(hosts))


@pytest.mark.parametrize("hosts", ["aabb", "abab", "aaabbbccc", "ab"])
def test_hosts_that_fit(hosts):
    assert findings(hosts) == ([], [])


@pytest.mark.parametrize(("field", "value"), [("code", "0.1.0 (99998888)"), ("python", "3.11.2"), ("torch", "2.11.0")])
def test_unequal_versions(field, value):
    errors, _ = findings(**{field: {2: value, 3: value}})
    assert len(errors) == 1
    assert errors[0].startswith(f"{field}: ranks 2, 3 (host b) run ")
    assert value in errors[0]


def test_crossed_cables_are_found_and_two_routed_networks_are_not():
    errors, _ = findings(network={2: "10.0.1.0/24", 3: "10.0.0.0/24"})
    assert [error.split(" (")[0] for error in errors] == ["cables: rank 2", "cables: rank 3"]
    assert findings(network={2: "10.9.0.0/24", 3: "10.9.1.0/24"}) == ([], [])
    assert findings(network=dict.fromkeys(range(4), "10.0.0.0/24")) == ([], [])
    assert findings(network={2: ""}) == ([], [])


def test_what_the_launcher_calls_one_node_are_two_hosts():
    errors, _ = findings(node={2: 0, 3: 0}, local_rank={2: 2, 3: 3})
    assert [error.split(":")[0] for error in errors] == ["node 0"]
    assert "rank 1 on a, rank 2 on b" in errors[0]


def test_warnings():
    assert [text.split(":")[0] for text in findings(local_rank={3: 0})[1]] == ["places"]
    assert findings("aab")[1] == [
        "ranks per host differ (a 2, b 1): ranks of smaller hosts carry traffic of several others"
    ]
    (clocks,) = findings(clock_s={3: 1007.5})[1]
    assert "host b (rank 3) is 7.5 s ahead of host a (rank 0)" in clocks
    assert findings(clock_s={3: 1001.0}) == ([], [])


def test_everything_wrong_at_once_is_one_report():
    errors, warnings = findings(code={3: "x"}, torch={2: "y"}, clock_s={1: 0.0})
    assert (len(errors), len(warnings)) == (2, 1)


def test_this_host():
    card = own_card("here", {"MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "1", "GROUP_RANK": "x"})
    assert (card.local_rank, card.node, card.network) == (1, None, "127.0.0.0/8")
    assert source_hash() in card.code


def test_the_interface_towards_this_host():
    assert interface_towards("127.0.0.1") == ("lo", ipaddress.IPv4Interface("127.0.0.1/8"))
    assert interface_towards("no-such-host.invalid") is None
    assert interface_towards("") is None or interface_towards("")[0]
