"""The way through host memory: files, words and chunks between real processes; the GPU's part is in tests/pipeline."""

import pytest

from tests.exchange import staged_steps


@pytest.mark.parametrize("chunk_bytes", [1000, 999, 1 << 20])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_piece_arrives_where_it_belongs_and_words_are_down_again(pools, ranks, chunk_bytes):
    compared = pools(ranks).run(staged_steps.host_moves, 3, chunk_bytes)
    assert compared == [3 * 2 * (ranks - 1) * sum(staged_steps.SIZES)] * ranks


def test_giving_up_raises_every_word_that_is_waited_for(pools):
    before, after = pools(2).run(staged_steps.host_give_up)[0]
    assert set(before) == {0}
    assert set(after) == {1}
