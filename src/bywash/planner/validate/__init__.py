"""The planner held against measurements: DeepEP's tables, public serving points, and our own figures on two H200.

Reading order: `points` (a check and its error), `own`, `deepep`, `serving` (what is predicted, how), `aic` (the peer's
prediction), `tables` (files), `text` (the result). `bywash plan validate` calls `validate`.
"""

from bywash.planner.validate.run import Validation, validate

__all__ = ["Validation", "validate"]
