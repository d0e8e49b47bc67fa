"""Where bywash keeps what it makes once: models by name and compiled kernels.

Knows nothing of either. `models.presets` and `kernels.compile` call it.
"""

import os
from pathlib import Path

from bywash.errors import ConfigError


def cache_directory() -> Path:
    """$BYWASH_CACHE, or $XDG_CACHE_HOME/bywash, or ~/.cache/bywash; a variable that is empty counts as not set.

    Raises:
        ConfigError: none is set and this user has no home directory.
    """
    if root := os.environ.get("BYWASH_CACHE"):
        return Path(root)
    if root := os.environ.get("XDG_CACHE_HOME"):
        return Path(root) / "bywash"
    try:
        return Path.home() / ".cache" / "bywash"
    except RuntimeError as error:
        raise ConfigError("BYWASH_CACHE: this user has no home directory; set it to one to keep files in") from error
