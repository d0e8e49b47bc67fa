"""The command answers at once, never with a traceback."""

import subprocess
import sys

import pytest


def python(*args):
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=120)


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
