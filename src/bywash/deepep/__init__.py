"""DeepEP 2's expert-parallel interface over bywash's exchanges: `import bywash.deepep as deep_ep`.

Code written for `ElasticBuffer.dispatch` and `combine` runs on CPU processes and on any GPUs of one host that can map
each other's memory: no NIC, no NVSHMEM, no whitelist of shapes. What is not supported raises `ConfigError` by its name;
docs/deepep.md has the list. None of DeepEP's code is here or needed.
"""

import torch

from bywash.deepep.buffer import ElasticBuffer
from bywash.deepep.event import EventHandle, EventOverlap
from bywash.deepep.handle import EPHandle

topk_idx_t = torch.int64

__all__ = ["EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap", "topk_idx_t"]
