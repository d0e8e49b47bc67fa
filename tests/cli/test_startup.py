"""The command answers at once, never with a traceback."""

import os
import subprocess
import sys

import pytest


def python(*args, **variables):
    environment = {**os.environ, **variables}
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=200, env=environment)


@pytest.mark.parametrize("code", ["import bywash", "import bywash.cli.main"])
def test_import_does_not_load_torch(code):
    done = python("-c", f"{code}; import sys; print('torch' in sys.modules, 'transformers' in sys.modules)")
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_public_names_are_there():
    import bywash

    for name in bywash.__all__:
        assert getattr(bywash, name) is not None
    assert set(dir(bywash)) == set(bywash.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        bywash.nonsense  # noqa: B018


def test_help_lists_the_commands():
    done = python("-m", "bywash", "--help")
    assert done.returncode == 0
    assert "run" in done.stdout
    assert "trace" in done.stdout


def test_a_mistake_is_one_line_and_exit_code_2():
    done = python("-m", "bywash", "run", "--ranks", "0")
    assert done.returncode == 2
    assert done.stderr.strip() == "bywash: --ranks 0: choose 1 to 64 local processes"


def test_where_compiled_code_cannot_be_kept_the_user_is_told_what_to_set():
    nowhere = {"NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator", "NUMBA_CACHE_DIR": ""}
    done = python("-m", "bywash", "fabric", "prove", "--topology", "ring:switches=4,hosts=4", **nowhere)
    assert done.returncode == 2
    assert done.stderr.startswith("bywash: NUMBA_CACHE_DIR: cannot cache function ")
    assert done.stderr.endswith("; set it to a directory that can be written\n")
    assert len(done.stderr.splitlines()) == 1
