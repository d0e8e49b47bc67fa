"""Starting ranks: as local processes, or as what torchrun has started already."""

from bywash.launch.local import RankMain, run_local
from bywash.launch.torchrun import run_under_torchrun, under_torchrun

__all__ = ["RankMain", "run_local", "run_under_torchrun", "under_torchrun"]
