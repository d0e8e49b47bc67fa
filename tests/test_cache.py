"""The cache directory: where it lies, and what is said where it cannot be."""

from pathlib import Path

import pytest

from bywash.cache import cache_directory
from bywash.errors import ConfigError
from bywash.models.presets import preset_directory


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"BYWASH_CACHE": "/big/disk"}, "/big/disk"),
        ({"BYWASH_CACHE": "", "XDG_CACHE_HOME": "/xdg"}, "/xdg/bywash"),
        ({"XDG_CACHE_HOME": "", "HOME": "/home/me"}, "/home/me/.cache/bywash"),
    ],
)
def test_a_variable_that_is_empty_counts_as_not_set(monkeypatch, variables, wanted):
    for name in ("BYWASH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_directory() == Path(wanted)


def test_a_user_without_home_is_told_what_to_set(monkeypatch):
    def none():
        raise RuntimeError("Could not determine home directory.")

    for name in ("BYWASH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", none)
    with pytest.raises(ConfigError, match=r"^BYWASH_CACHE: this user has no home directory"):
        cache_directory()


def test_a_model_that_cannot_be_kept_is_an_error_that_says_where(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("BYWASH_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"--model olmoe-tiny: cannot be made in .*file: .* set BYWASH_CACHE"):
        preset_directory("olmoe-tiny")
