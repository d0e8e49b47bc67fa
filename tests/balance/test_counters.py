import numpy as np

from bywash.balance import Limits, Placement, SlotDirectory, plan_step
from bywash.balance.counters import LayerCounters, as_json, as_prometheus, imbalance


def test_counters_by_hand():
    counts_RE = np.array([[10, 0], [7, 2]], dtype=np.int32)
    directory = SlotDirectory.empty(ranks=2, slots=1, experts=2)
    plan = plan_step(counts_RE, Placement.equal(2, 2), Limits(capacity=4), directory)
    assert plan.rows_ER.tolist() == [[13, 4], [0, 2]]  # a slot takes the capacity, home the rest in four waves
    counters = [LayerCounters(), LayerCounters()]
    assert counters[1].add_step(plan, counts_RE).tolist() == [13, 6]
    # one row fewer from rank 0 than planned: the slot's four, which are the last, stay four
    assert counters[1].add_step(plan, np.array([[9, 0], [7, 2]], dtype=np.int32)).tolist() == [12, 6]
    assert as_json(counters)[1] == {
        "layer": 1,
        "steps": 2,
        "rows_home": 29,
        "rows_spilled": 8,
        "rows_waited": 17,
        "most_waves": 4,
        "busiest_home": 33,
        "busiest": 25,
        "fetches": 0,
        "fetched_bytes": 0,
        "plan_us": 0.0,
    }
    assert imbalance(counters, 2) == (33 * 2 / 37, 25 * 2 / 37)
    text = as_prometheus(counters)
    assert 'bywash_overflow_rows_spilled_total{layer="1"} 8\n' in text
    assert "# TYPE bywash_overflow_most_waves gauge\n" in text
    assert text.count("# TYPE") == 10
