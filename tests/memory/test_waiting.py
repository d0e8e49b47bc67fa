import time

import pytest

from bywash.memory import sleep_until_ns, wait_until


def test_nothing_pending_is_no_wait():
    wait_until(list, lambda left, waited: pytest.fail("asked for a check"))


def test_the_check_sees_who_is_left_and_may_give_up():
    seen = []

    def check(left, waited_ns):
        seen.append((left, waited_ns))
        if len(seen) == 2:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        wait_until(lambda: [2, 5], check)
    assert [left for left, _ in seen] == [[2, 5], [2, 5]]
    assert seen[0][1] < seen[1][1]


def test_a_long_wait_sleeps():
    """Looking all the time would be some hundred thousand looks; other work on the machine only takes some away."""
    end, looks = time.monotonic() + 0.3, []
    wait_until(lambda: looks.append(1) or ([1] if time.monotonic() < end else []), lambda left, waited: None)
    assert len(looks) < 10_000


def test_a_timed_sleep_never_ends_early():
    for wait_ns in (0, 1000, 50_000, 400_000, 3_000_000):
        due = time.monotonic_ns() + wait_ns
        sleep_until_ns(due)
        assert time.monotonic_ns() >= due
