"""The training example at miniature size: its corpus, and a stopped run that resumes to the same weights."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
EXAMPLES = Path(__file__).parents[2] / "examples"


def train(*arguments):
    """Call the script as from the command line, in a namespace of its own but without importing torch once more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train_tiny_moe.py", "--miniature", "--device", "cpu", *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / "train_tiny_moe.py"), run_name="__main__")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    subprocess.run([sys.executable, EXAMPLES / "corpus.py", "--out", folder], check=True, timeout=200)
    return folder


def test_corpus_has_every_topic_in_every_split(corpus):
    about = json.loads((corpus / "corpus.json").read_text())
    assert len(about["files"]) == 9
    for name, facts in about["files"].items():
        data = (corpus / name).read_bytes()
        assert len(data) == facts["bytes"] > 20_000, name
        assert data.count(b"\0") == facts["documents"] - 1, name
        data.decode()


def test_a_stopped_run_resumes_to_the_same_weights(corpus, tmp_path, capsys):
    train("--corpus", corpus, "--out", tmp_path / "whole")
    train("--corpus", corpus, "--out", tmp_path / "parts", "--until", 20)
    assert "resuming" not in capsys.readouterr().out
    train("--corpus", corpus, "--out", tmp_path / "parts")
    assert "resuming after step 20" in capsys.readouterr().out
    whole, parts = (tmp_path / name / "moe" for name in ("whole", "parts"))
    for name in ("model.safetensors", "config.json"):
        assert (whole / "best" / name).read_bytes() == (parts / "best" / name).read_bytes()
    log = [json.loads(line) for line in (parts / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [10, 20, 30, 40]
    assert log[-1]["validation"]["mix"] < log[0]["validation"]["mix"]
