"""Rows to ranks and sums back over the CPU exchanges, in process groups that somebody else made."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bywash.errors import ConfigError, RankLostError
from bywash.exchange import open_exchange
from bywash.exchange.borrowed import BorrowedGroup
from bywash.exchange.carrier import ExchangeCarrier
from bywash.exchange.payload import RowFormat, RowParts
from tests.ranks import RankPool

COLUMNS, TOP_K = 5, 3


def parts_of(rank, step):
    made = torch.Generator().manual_seed(7 * step + rank)
    tokens = (3 * rank + step) % 5
    ranks = torch.tensor([[0, 1], [1, -1], [-1, -1], [0, -1], [0, 1]])[:tokens]
    parts = RowParts(
        x_ND=torch.randn(tokens, COLUMNS, generator=made),
        scales_NG=torch.randint(0, 1 << 30, (tokens, 2), generator=made).int(),
        source_N=torch.arange(tokens, dtype=torch.int32) + 100 * rank,
        ids_NK=torch.randint(0, 9, (tokens, TOP_K), generator=made).int(),
        weights_NK=torch.rand(tokens, TOP_K, generator=made),
    )
    return parts, ranks


def carry(group, name):
    """A group of two of the three ranks, not the first ones; steps overlap by one."""
    pair = dist.new_group([2, 1])  # collective over all ranks
    if group.rank == 0:
        return 0
    borrowed = BorrowedGroup(pair, deadline_s=60)
    assert (borrowed.ranks, borrowed.hosts.hosts) == (2, 1)
    form = RowFormat(columns=COLUMNS, dtype=torch.float32, scales=2, scale_dtype=torch.int32, top_k=TOP_K)
    exchange = open_exchange(name, borrowed, combine_mode="exact")
    carrier = ExchangeCarrier(exchange, columns=COLUMNS, dtype=torch.float32, sent_bytes=form.bytes)
    rows, before = 0, None
    for step in range(5):
        parts, ranks = parts_of(carrier.rank, step)
        now = carrier.start(form.pack(parts, carrier.sent_bytes), ranks), step, form
        if before is not None:
            rows += finish(carrier, *before)
        before = now
    rows += finish(carrier, *before)
    assert carrier.extra_steps == 0
    assert carrier.traffic()["exchange_rows_sent"] > 0
    carrier.close()
    borrowed.close()
    return rows


def finish(carrier, step, number, form):
    arrived = carrier.finish(step)
    got = form.unpack(arrived.rows_PB, arrived.at_N)
    want = []
    for rank in range(2):
        parts, ranks = parts_of(rank, number)
        here = (ranks == carrier.rank).any(dim=1)
        fields = (parts.x_ND, parts.scales_NG, parts.source_N, parts.ids_NK, parts.weights_NK)
        want.append([part[here] for part in fields])
        assert arrived.from_R[rank] == here.sum()
    found = (got.x_ND, got.scales_NG, got.source_N, got.ids_NK, got.weights_NK)
    for one, two in zip(found, zip(*want, strict=True), strict=True):
        assert torch.equal(one, torch.cat(two))
    y = torch.zeros(got.x_ND.shape[0], carrier.columns)
    y[:, :COLUMNS] = got.x_ND * (carrier.rank + 1)
    carrier.start_back(step, y)
    out = carrier.finish_back(step)[:, :COLUMNS]
    parts, ranks = parts_of(carrier.rank, number)
    times = torch.where(ranks >= 0, ranks + 1, 0).sum(dim=1, keepdim=True)
    torch.testing.assert_close(out, parts.x_ND * times)
    return got.x_ND.shape[0]


@pytest.mark.parametrize("name", ["shm", "gloo"])
def test_rows_in_part_of_a_job(pools, name):
    none, *rows = pools(3).run(carry, name)
    assert none == 0
    assert min(rows) > 0


def stay_away(group):
    if group.rank == 0:
        return "stayed away"
    with pytest.raises(RankLostError, match="rank 0 did not answer while joining"):
        BorrowedGroup(dist.group.WORLD, deadline_s=1)
    return "noticed"


def test_a_rank_that_does_not_join_is_named(pools):
    pool = pools(2)
    assert pool.run(stay_away) == ["stayed away", "noticed"]
    pool.close()  # the ranks have borrowed the group unequally often


def miss_collectives(group):
    """Rank 1 joins and then stays away; the process group would wait for half an hour."""
    errors = []
    for call in ("counts", "start"):
        borrowed = BorrowedGroup(dist.new_group(), deadline_s=60)
        exchange = open_exchange("gloo", borrowed, combine_mode="exact")
        borrowed.deadline_s = 1  # not for joining, which may take longer
        if group.rank == 1:
            continue
        try:
            if call == "counts":
                exchange.counts(np.zeros(2, np.int32))
            else:
                carrier = ExchangeCarrier(exchange, columns=4, dtype=torch.float32, sent_bytes=16)
                carrier.start(torch.zeros(3, 16, dtype=torch.uint8), torch.zeros(3, 1, dtype=torch.int64))
        except RankLostError as error:
            errors.append(str(error))
    return errors


def test_a_borrowed_group_has_our_deadline():
    pool = RankPool(2)
    (counts, start), _ = pool.run(miss_collectives)
    pool.close()
    for error, during in ((counts, "gathering counts"), (start, "agreeing on the plan")):
        assert "rank 1 " in error
        assert "is late" in error
        assert during in error


def refuse_the_third(group, name):
    """Two steps that nobody closes, and a third that rank 1 refuses: each rank's error."""
    exchange = open_exchange(name, BorrowedGroup(dist.new_group(), deadline_s=60), combine_mode="exact")
    carrier = ExchangeCarrier(exchange, columns=4, dtype=torch.float32, sent_bytes=16)
    rows, ranks = torch.zeros(3, 16, dtype=torch.uint8), torch.ones(3, 1, dtype=torch.int64)
    for _ in range(2):
        carrier.start(rows, ranks)
    try:
        if group.rank == 1:
            carrier.refuse(ConfigError("rank 1 has no rows to send"))
        carrier.finish(carrier.start(rows, ranks))
    except ConfigError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("shm", "rank 1 has no rows to send (found by rank 1)"),
        ("gloo", "rank 1 refused this step before it sent a row: its own error says why"),
    ],
)
def test_a_rank_that_refuses_a_step_is_named_at_once(pools, name, told):
    assert pools(2).run(refuse_the_third, name) == [told, "rank 1 has no rows to send"]


def test_misuse():
    carrier = ExchangeCarrier(open_exchange("local", None), columns=4, dtype=torch.float32, sent_bytes=20)
    assert carrier.sent_bytes == 20
    rows, ranks = torch.zeros(3, 20, dtype=torch.uint8), torch.zeros(3, 1, dtype=torch.int64)
    with pytest.raises(ConfigError, match="rows of 20 bytes"):
        carrier.start(rows[:, :8], ranks)
    step = carrier.start(rows, ranks)
    with pytest.raises(ConfigError, match="sent was used where one that is arrived"):
        carrier.start_back(step, torch.zeros(3, 5))
    with pytest.raises(ConfigError, match="exact"):
        ExchangeCarrier(open_exchange("local", None, combine_mode="fast"), columns=4, dtype=torch.float32, sent_bytes=4)
