"""What ranks run in the tests of `NodeDevice`: random steps across hosts against the oracle, on GPUs or emulated.

Every rank draws all inputs from one seed; experts are stand-ins (row * factor of the expert, rounded), bitwise equal on
CPU and GPU.
"""

import os
import signal
import time

import torch

from bywash.balance import Placement
from bywash.errors import BywashError
from bywash.exchange.host_map import HostMap
from bywash.exchange.node_device import NodeDevice
from bywash.exchange.node_layout import NodeLayout
from bywash.exchange.node_naive import outputs_naive
from bywash.exchange.node_wire import NcclWire
from bywash.exchange.peer_device import PeerDevice
from bywash.exchange.peer_layout import PeerLayout
from tests.exchange.peer_steps import factors, same_bits
from tests.exchange.pushing import may_push, push_outputs
from tests.kernels import emulator


def layout_of(hosts, *, experts, top_k, hidden, dtype, mode, tokens, capacity):
    return NodeLayout(
        hosts=hosts.hosts,
        per_host=len(hosts.members[0]),
        experts=experts,
        top_k=top_k,
        tokens=tokens,
        hidden=hidden,
        dtype=getattr(torch, dtype),
        combine=mode,
        capacity=capacity,
    )


def draw(seed, layout, ranks):
    """Every rank's (x, ids, weights): other counts each time, sometimes none, holes, or all for one host."""
    generator = torch.Generator().manual_seed(seed)
    kind = int(torch.randint(3, (1,), generator=generator))
    found = []
    for rank in range(ranks):
        tokens = int(torch.randint(layout.tokens + 1, (1,), generator=generator))
        tokens = 0 if seed % 5 == 0 and rank == seed % ranks else tokens
        x = torch.randn(tokens, layout.hidden, generator=generator).to(layout.dtype)
        reach = layout.experts if kind < 2 else max(layout.top_k, layout.experts // layout.hosts)
        ids = torch.rand(tokens, reach, generator=generator).argsort(dim=1)[:, : layout.top_k].contiguous()
        if kind == 1:
            ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.6, -1, ids)
        found.append((x, ids, torch.rand(tokens, layout.top_k, generator=generator)))
    return found


def rank_outputs(x, ids, layout):
    """[T, K, D] of the stand-in experts."""
    return (x.float()[:, None, :] * factors(layout.experts)[ids.clamp(min=0)][:, :, None]).to(layout.dtype)


def expert_outputs(device, received, factor_L):
    """The stand-in experts on what arrived; rows past M are garbage."""
    index = received.index_M.long()
    at = torch.arange(index.numel(), device=index.device, dtype=torch.int32)
    local = torch.searchsorted(received.ends_L[: factor_L.numel()].contiguous(), at, right=True)
    factor = factor_L[local.clamp(max=max(0, factor_L.numel() - 1))] if factor_L.numel() else at.float()
    return (received.rows_PD[index].float() * factor[:, None]).to(device.node.dtype)


def factors_here(device, placement):
    """[L]: of this rank's experts, ascending."""
    here = torch.from_numpy(placement.home_E == device.rank)
    return factors(placement.num_experts)[here].to(device.tables.host_E.device)


def random_steps(device, hosts, placement, steps, seed):
    """Random steps on both channels against the oracle; returns how many waves the fullest needed."""
    layout, factor_L, rank_E = device.node, factors_here(device, placement), placement.home_E.tolist()
    where = device.tables.host_E.device
    for step in range(steps):
        x, ids, weights = (part.to(where) for part in draw(seed + step, layout, device.ranks)[device.rank])
        generation = step % 2
        received = device.dispatch(x, ids, weights, generation=generation, counts_first=bool(step % 3))
        y, pushed = expert_outputs(device, received, factor_L), may_push(received, seed + step, device.rank)
        if pushed:
            push_outputs(received, y)
        out = device.combine(y, generation=generation, pushed=pushed)
        device.check()
        x, ids, weights, out = (part.cpu() for part in (x, ids, weights, out))
        expected = outputs_naive(rank_outputs(x, ids, layout), ids, weights, rank_E, hosts, layout)
        assert same_bits(out, expected), f"step {step}: {(out != expected).any(1).sum()} rows of {len(out)} differ"
    return device.overflowed()


def padded_steps(device, hosts, placement, steps, seed):
    """Steps whose number of tokens only the device knows, as one captured graph would replay them."""
    layout, factor_L, rank_E = device.node, factors_here(device, placement), placement.home_E.tolist()
    where = device.tables.host_E.device
    x = torch.zeros(layout.tokens, layout.hidden, dtype=layout.dtype, device=where)
    ids = torch.zeros(layout.tokens, layout.top_k, dtype=torch.int64, device=where)
    weights = torch.zeros(layout.tokens, layout.top_k, device=where)
    tokens = torch.zeros(1, dtype=torch.int32, device=where)

    def step():
        received = device.dispatch(x, ids, weights, tokens=tokens)
        return device.combine(expert_outputs(device, received, factor_L))

    run = step
    if where.type == "cuda":
        step()
        device.check()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            captured = step()

        def run():
            graph.replay()
            return captured

    for number in range(steps):
        mine = draw(seed + number, layout, device.ranks)[device.rank]
        count = mine[0].shape[0]
        for buffer, value in zip((x, ids, weights), mine, strict=True):
            buffer[:count] = value.to(where)
        tokens.fill_(count)
        out = run()
        device.check()
        expected = outputs_naive(rank_outputs(*mine[:2], layout), *mine[1:], rank_E, hosts, layout)
        assert same_bits(out[:count].cpu(), expected), f"replay {number} of {count} tokens"
    return device.overflowed()


def too_few_waves(device, hosts, placement):
    """One wave of a step that needs all: how many were needed is known to every rank; then all are sent."""
    layout, factor_L = device.node, factors_here(device, placement)
    where = device.tables.host_E.device
    generator = torch.Generator().manual_seed(device.rank)
    x = torch.randn(layout.tokens, layout.hidden, generator=generator).to(layout.dtype).to(where)
    home = torch.from_numpy(placement.home_E)
    away = [e for e in range(layout.experts) if hosts.host_R[home[e]] != hosts.host_R[device.rank]]
    rows = layout.tokens if device.rank == 0 else 1  # only one rank has too many
    ids = torch.full((layout.tokens, layout.top_k), -1)
    ids[:rows, 0] = away[0]
    weights = torch.ones(layout.tokens, layout.top_k)
    needed = []
    for waves in (1, None):
        received = device.dispatch(x, ids.to(where), weights.to(where), waves=waves)
        out = device.combine(expert_outputs(device, received, factor_L))
        device.check()
        needed.append(device.overflowed())
    expected = outputs_naive(rank_outputs(x.cpu(), ids, layout), ids, weights, home.tolist(), hosts, layout)
    assert same_bits(out.cpu(), expected)
    return needed


def fail_on_purpose(device, hosts, placement, how):
    """The error that each rank gets when rank 1 does something wrong."""
    layout, where = device.node, device.tables.host_E.device
    x, ids, weights = (part.to(where) for part in draw(1, layout, device.ranks)[device.rank])
    x, ids, weights = x[:4], ids[:4], weights[:4]
    tokens = torch.full((1,), x.shape[0], dtype=torch.int32, device=where)
    if device.rank == 1 and how == "plan":
        device._digest += 1
    if device.rank == 1 and how == "expert":
        ids[0, 0] = layout.experts + 3
    if device.rank == 1 and how == "tokens":
        tokens += 9
    received = device.dispatch(x, ids, weights, tokens=tokens)
    device.combine(expert_outputs(device, received, factors_here(device, placement)))
    try:
        device.check()
    except BywashError as error:
        return type(error).__name__, str(error), list(getattr(error, "ranks", ()))
    return "no error", "", []


def play_host(host):
    """Make NCCL take this process for one on a host of its own: sockets over the loopback interface are all it has."""
    os.environ.update(
        NCCL_HOSTID=f"host-{host}", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1", NCCL_IB_DISABLE="1",
        NCCL_SOCKET_IFNAME="lo",
    )  # fmt: skip


def open_device(group, names, config, *, schedule="together", register=True):
    """A device end over NCCL; ranks with equal names are on one host, and on one GPU of this machine."""
    hosts = HostMap.of(names)
    torch.cuda.set_device(hosts.host_R[group.rank] % torch.cuda.device_count())
    layout = layout_of(hosts, **config)
    placement = Placement.equal(layout.experts, group.ranks)
    wire = NcclWire.open(group, hosts, schedule, register=register)
    return NodeDevice(group, layout, placement.home_E, wire, hosts=hosts), hosts, placement


def on_gpus(group, names, config, function, *args):
    """`function(device, hosts, placement, *args)` on GPUs that play hosts."""
    play_host(HostMap.of(names).host_R[group.rank])
    device, hosts, placement = open_device(group, names, config)
    try:
        return function(device, hosts, placement, *args)
    finally:
        device.close()
        device.wire.close()


class GlooWire(NcclWire):
    """The same calls between CPU processes."""

    device, backend, patience_s = "cpu", "gloo", 10.0

    def buffers(self, make):
        return make()

    def finished(self, limit_s):
        return True


def over_gloo(group, schedule, config, function, *args):
    """`function(device, hosts, placement, *args)` with every process a host of its own, kernels emulated."""
    hosts = HostMap.of(range(group.ranks))
    placement = Placement.equal(config["experts"], group.ranks)
    wire = GlooWire.open(group, hosts, schedule)
    try:
        with emulator.emulated():
            alone = emulator.Threads(1, group.deadline_s).rank(0)
            layout = layout_of(hosts, **config)
            device = NodeDevice(group, layout, placement.home_E, wire, hosts=hosts, inner_members=alone)
            return function(device, hosts, placement, *args)
    finally:
        wire.close()


class PatientWire(GlooWire):
    """As patient as NCCL."""

    patience_s = NcclWire.patience_s


def used_after_close(group):
    """A wire that works, and one that is closed."""
    wire = PatientWire.open(group, HostMap.of(range(group.ranks)))
    mine, theirs = torch.full((3,), float(group.rank)), torch.empty(3)
    wire([[mine]], [[theirs]])
    wire.close()
    wire.close()
    try:
        wire([[mine]], [[theirs]])
    except BywashError as error:
        return theirs.tolist(), f"{type(error).__name__}: {error}"
    return theirs.tolist(), "no error"


def nobody_at_the_other_end(group, stage):
    """Rank 1 stops before a stage of opening; rank 0's error."""
    hosts = HostMap.of(range(group.ranks))
    if stage != "meet" and group.rank == 1:
        group.share("here", "the stage before")
    if group.rank == 1:
        return "stayed away"
    group.deadline_s = 1.0
    try:
        PatientWire.open(group, hosts)
    except BywashError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def same_bits_as_peer(device, hosts, placement, seed):
    """One full step across "hosts", and the same through `PeerDevice` over the GPUs' own links: rows that differ."""
    layout = device.node
    generator = torch.Generator().manual_seed(seed + device.rank)
    x = torch.randn(layout.tokens, layout.hidden, generator=generator).to(layout.dtype).cuda()
    ids = torch.rand(layout.tokens, layout.experts, generator=generator).topk(layout.top_k).indices.contiguous().cuda()
    weights = torch.rand(layout.tokens, layout.top_k, generator=generator).cuda()
    received = device.dispatch(x, ids, weights)
    out = device.combine(expert_outputs(device, received, factors_here(device, placement)))
    device.check()
    sizes = PeerLayout(
        ranks=device.ranks, experts=layout.experts, top_k=layout.top_k, tokens=layout.tokens, hidden=layout.hidden,
        dtype=layout.dtype, exact=layout.combine == "exact",
    )  # fmt: skip
    peer = PeerDevice(device._group, sizes, placement.home_E, combine_mode=layout.combine)
    got = peer.dispatch(x, ids, weights)
    rows = got.rows_PD[got.index_M.long()].float()
    at = torch.arange(rows.shape[0], device="cuda", dtype=torch.int32)
    local = torch.searchsorted(got.ends_L[: int((placement.home_E == device.rank).sum())].contiguous(), at, right=True)
    factor_L = factors_here(device, placement)
    wanted = peer.combine((rows * factor_L[local.clamp(max=factor_L.numel() - 1)][:, None]).to(layout.dtype))
    peer.check()
    assert not out.isnan().any()
    assert float(out.float().abs().sum()) > 0
    differ = int((out.view(torch.int16) != wanted.contiguous().view(torch.int16)).any(1).sum())
    peer.close()
    return differ


def lose_the_other_host(device, hosts, placement):
    """Rank 1 is killed after a good step; rank 0 gets an error, and its process and GPU live on."""
    layout, factor_L = device.node, factors_here(device, placement)
    x, ids, weights = (part.cuda() for part in draw(1, layout, device.ranks)[device.rank])

    def step():
        received = device.dispatch(x, ids, weights)
        return device.combine(expert_outputs(device, received, factor_L))

    step()
    device.check()
    if device.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        step()
        device.check()
    except BywashError as error:
        alive = float(torch.ones(1000, device="cuda").sum())
        return type(error).__name__, list(getattr(error, "ranks", ())), str(error), time.monotonic() - began, alive
    return "no error", [], "", 0.0, 0.0
