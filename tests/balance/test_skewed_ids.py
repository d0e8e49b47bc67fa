"""Ids that benchmarks draw with a recorded layer's popularity."""

import json

import numpy as np
import pytest
import torch
from benchmarks.skewed_ids import counts_for, draw_ids, middle_layer, popularity


def test_every_token_gets_distinct_experts_as_often_as_recorded():
    counts_E = np.array([0.0, 10.0, 20.0, 30.0, 40.0, 300.0])
    ids_TK = draw_ids(popularity(counts_E), 20_000, 1, torch.Generator().manual_seed(3))
    share_E = torch.bincount(ids_TK.flatten(), minlength=6) / 20_000
    assert torch.allclose(share_E, popularity(counts_E) / popularity(counts_E).sum(), atol=0.01)
    ids_TK = draw_ids(popularity(counts_E), 500, 4, torch.Generator().manual_seed(4))
    assert (ids_TK.sort(1).values.diff(dim=1) > 0).all()


def test_the_middle_layer_is_the_median_by_its_busiest_rank():
    counts_LE = np.array([[4.0, 4, 0, 0], [1, 1, 1, 1], [3, 3, 1, 1]])
    assert middle_layer(counts_LE, 2) == (2, 1.5)


def test_counts_of_other_experts_end_the_program_with_a_line(tmp_path):
    path = tmp_path / "counts.json"
    path.write_text(json.dumps([[1, 2, 3]]))
    with pytest.raises(SystemExit, match="have 3 experts; 256 are needed"):
        counts_for(str(path), 256)
    with pytest.raises(SystemExit, match="cannot read the counts"):
        counts_for(str(tmp_path / "none.json"), 256)
