"""The Hopper expert kernel against its oracle, on a GPU. `experts_cases.py` runs the same outside pytest."""

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs an sm_90 GPU (H100, H200)", allow_module_level=True)
pytest.importorskip("cuda.core", reason="cuda-core is not installed: pip install 'bywash[cuda]'")

from tests.kernels.experts_cases import CASES


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name):
    assert CASES[name]() is None
