import platform

import pytest

from bywash.errors import ConfigError
from bywash.memory import EPOCHS, arrived, epoch_of_step, flag, low32, require_store_order, store_release


def test_a_word_says_which_step_and_what():
    word = flag(7, 0xDEADBEEF)
    assert word == 0x7_DEADBEEF
    assert arrived(word, 7)
    assert not arrived(word, 6)
    assert not arrived(word, 8)
    assert low32(word) == 0xDEADBEEF


def test_a_fresh_heap_has_no_epoch_and_epochs_wrap_past_zero():
    assert [epoch_of_step(step) for step in (0, 1, EPOCHS - 1, EPOCHS, EPOCHS + 1)] == [1, 2, EPOCHS, 1, 2]
    assert flag(EPOCHS, 2**32 - 1) == 2**64 - 1
    assert not any(arrived(0, epoch_of_step(step)) for step in (0, EPOCHS - 1, EPOCHS))


def test_a_store_writes_one_word():
    words = memoryview(bytearray(24)).cast("Q")
    store_release(words, 1, flag(1, 2))
    assert words.tolist() == [0, flag(1, 2), 0]


def test_machines_that_reorder_stores_are_refused(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(ConfigError, match=r"this machine is aarch64.*Use --exchange gloo"):
        require_store_order()
