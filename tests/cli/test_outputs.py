"""Where commands write, what they refuse before they start, and how they end when nobody reads on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bywash.cli import limits, run
from bywash.cli.main import app
from bywash.cli.output import apart, replaceable, writable, write_json
from bywash.errors import ConfigError, TraceError
from bywash.routing import RoutingTrace
from tests.routing.trace_samples import small_trace

SMALL = ("--ranks", "1", "--tokens", "2", "--prompt", "one")


def bywash(*args):
    app([str(a) for a in args], standalone_mode=False)


def command(*args, **options):
    return subprocess.run(
        [sys.executable, "-m", "bywash", *map(str, args)],
        stderr=subprocess.PIPE,
        text=True,
        timeout=200,
        **options,
    )


@pytest.fixture
def no_work(monkeypatch):
    """Starting ranks is a failure."""

    def started(*args):
        raise AssertionError("work began before the check")

    monkeypatch.setattr("bywash.launch.run_local", started)
    monkeypatch.setattr("bywash.launch.run_under_torchrun", started)


@pytest.mark.parametrize(
    ("args", "first", "second"),
    [
        (("run", *SMALL), "--json", "--trace"),
        (("run", *SMALL), "--trace", "--timeline"),
        (("run", *SMALL), "--json", "--timeline"),
        (("bench", "layer"), "--json", "--timeline"),
        (("fabric", "tune", "values.yaml"), "--json", "--out"),
    ],
)
def test_two_outputs_in_one_file_are_refused(tmp_path, no_work, args, first, second):
    with pytest.raises(ConfigError, match=f"^{second} .*: is {first} too; give it another name"):
        bywash(*args, first, tmp_path / "out", second, tmp_path / "." / "out")


def test_outputs_that_are_one_file_by_another_name(tmp_path):
    (tmp_path / "one").write_text("")
    (tmp_path / "hard").hardlink_to(tmp_path / "one")
    (tmp_path / "soft").symlink_to("new")
    for same in (("one", "hard"), ("soft", "new")):
        with pytest.raises(ConfigError, match="is --json too"):
            apart(dict(zip(("--json", "--out"), (tmp_path / name for name in same), strict=True)))
    apart({"--json": "-", "--out": tmp_path / "one", "--trace": None, "--timeline": tmp_path / "new"})
    apart({"--json": "/dev/null", "--trace": "/dev/null"})


BAD_PLACES = ["", "{tmp}", "{tmp}/none/out", "{tmp}/file/out", "/proc/out", "/dev/full", "{tmp}/" + "x" * 300]


@pytest.mark.parametrize("place", BAD_PLACES)
@pytest.mark.parametrize(
    ("args", "flag"),
    [
        (("run", "--json"), "--json"),
        (("run", "--trace"), "--trace"),
        (("bench", "exchange", "--json"), "--json"),
        (("trace", "record", "--out"), "--out"),
        (("trace", "make", "--out"), "--out"),
        (("trace", "show", "mixed", "--json"), "--json"),
    ],
)
def test_bad_places_are_refused_before_any_work(tmp_path, no_work, args, flag, place):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"^{flag} "):
        bywash(*args, place.format(tmp=tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_checking_leaves_files_alone(tmp_path):
    file = tmp_path / "a"
    writable(file, "--json")
    assert not file.exists()
    file.write_text("old")
    writable(file, "--json")
    replaceable(file, "--out")
    assert file.read_text() == "old"


def test_devices_are_not_replaced_by_traces():
    with pytest.raises(ConfigError, match="--out /dev/full: is no regular file"):
        replaceable("/dev/full", "--out")
    with pytest.raises(TraceError, match="/dev/full: cannot write the trace"):
        small_trace().save("/dev/full")
    for name in ("", "/", "/etc/hostname/x"):
        with pytest.raises(TraceError, match="cannot write the trace"):
            small_trace().save(name)
    assert Path("/dev/full").is_char_device()


def test_a_full_disk_is_named():
    with pytest.raises(ConfigError, match="--json /dev/full: cannot write it: No space left"):
        write_json("/dev/full", {})


def test_run_prints_its_json_and_nothing_else():
    done = command("run", *SMALL, "--json", "-", stdout=subprocess.PIPE)
    assert json.loads(done.stdout)["generated_tokens"] == 2


@pytest.mark.parametrize(
    ("args", "left"),
    [(("run", *SMALL), 0), (("trace", "show", "mixed"), 0), (("--version",), 0), (("trace", "--help"), 0)],
)
def test_stdout_that_cannot_be_written(args, left):
    with open("/dev/full", "w") as full:
        done = command(*args, stdout=full)
    said = [line for line in done.stderr.splitlines() if "No space left" in line]
    assert len(said) == 1
    assert said[0].startswith("bywash: ")
    assert "Traceback" not in done.stderr
    assert done.returncode == 1
    reader, writer = os.pipe()
    os.close(reader)
    done = command(*args, stdout=writer)
    os.close(writer)
    assert "Broken" not in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode in (1, 141)


def test_closed_stdout():
    done = subprocess.run(
        ["bash", "-c", '"$0" -m bywash run --ranks 2 --tokens 2 >&-', sys.executable],
        stderr=subprocess.PIPE,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


def test_interrupted_while_ranks_start(tmp_path):
    """Ctrl-C goes to all processes of the terminal, also to the one that still imports what ranks need."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bywash", "bench", "exchange"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    children, end = Path(f"/proc/{process.pid}/task/{process.pid}/children"), time.monotonic() + 100
    while not any(
        b"forkserver" in Path(f"/proc/{child}/cmdline").read_bytes() for child in children.read_text().split()
    ):
        assert time.monotonic() < end
        time.sleep(0.02)
    time.sleep(0.3)  # it imports for seconds
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 130
    assert said == "bywash: interrupted\n"


def test_interrupted(tmp_path):
    args = ["trace", "make", "--steps", "20000", "--out", str(tmp_path / "t")]
    process = subprocess.Popen(
        [sys.executable, "-m", "bywash", *args],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # what a shell starts with & ignores it
    )
    try:
        assert "bywash: making 20,000 steps" in process.stderr.readline()
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, said.strip()) == (130, "bywash: interrupted")


@pytest.mark.parametrize("deadline", ["nan", "inf", "-1", "0", "1e7"])
@pytest.mark.parametrize("args", [("run",), ("bench", "exchange")])
def test_deadlines_have_bounds(no_work, args, deadline):
    with pytest.raises(ConfigError, match="--deadline"):
        bywash(*args, "--deadline", deadline)


@pytest.mark.parametrize("args", [("run",), ("bench", "exchange")])
def test_a_link_must_beat_the_deadline(no_work, args):
    with pytest.raises(ConfigError, match="--latency"):
        bywash(*args, "--link", "1Gbps", "--latency", "2s", "--deadline", "2")


def test_text_that_is_no_unicode(no_work):
    with pytest.raises(ConfigError, match=r"--prompt '\\udcff': is not valid UTF-8"):
        bywash("run", "--prompt", "\udcff")


@pytest.mark.parametrize(("rank", "ranks"), [("x", "2"), ("0", "y"), ("2", "2"), ("-1", "2")])
def test_a_broken_launcher_is_named(monkeypatch, rank, ranks):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", ranks)
    with pytest.raises(ConfigError, match=r"RANK=|WORLD_SIZE="):
        bywash("run")


def test_a_micro_batch_is_no_larger_than_the_prompts():
    request = run.RunRequest(prompts=(((1, 2), None), ((3,), None)), micro_batch=10**12)
    assert run._job_options(request).micro_batch == 2


def test_prompts_and_topics_stay_together(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "f\u2028", "topic": "c"}\n')
    assert run.collect_prompts(["a"], ["1,2"], None, ["x", "y"]) == (("a", "x"), ((1, 2), "y"))
    assert run.collect_prompts([], [], str(file), []) == (("f\u2028", "c"),)
    with pytest.raises(ConfigError, match="--topic: cannot label a --prompts file"):
        run.collect_prompts(["a"], [], str(file), ["x"])
    with pytest.raises(ConfigError, match="its prompts have topics"):
        run.collect_prompts([], ["1"], str(file), [])
    file.write_text('{"prompt": "f"}\n')
    assert run.collect_prompts(["a"], ["1"], str(file), []) == (("a", None), ("f", None), ((1,), None))


def test_ids_are_read_in_the_order_of_their_topics(tmp_path):
    out = tmp_path / "t.npz"
    bywash("run", *SMALL, "--prompt-ids", "7,8", "--topic", "text", "--topic", "ids", "--trace", out)
    trace = RoutingTrace.load(out)
    assert trace.topics == ("text", "ids")
    first = trace.token_prompt_N[: trace.step_tokens_S[0]]
    assert ((first == 0).sum(), (first == 1).sum()) == (3, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no prompts"),
        ("\n \n", "has no prompts"),
        ('{"prompt": null}', "prompt 1 must be an object"),
        ('{"prompt": 5}', "prompt 1 must be an object"),
        ('["prompt"]', "prompt 1 must be an object"),
        ('{"prompt": "a", "topic": 3}', "prompt 1 must be an object"),
        ('{"prompt": "a", "topic": "t"}\n{"prompt": "b"}', "some lines have a 'topic' and some have none"),
        ("[" * 100_000, "cannot read it"),
        ("{", "cannot read it"),
    ],
)
def test_prompt_files_are_checked(tmp_path, text, message):
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"--prompts .*{message}"):
        run.read_prompts(str(file))


def test_help_shows_the_defaults_that_typer_does_not_know():
    done = command("run", "--help", stdout=subprocess.PIPE, env={**os.environ, "COLUMNS": "200"})
    assert "(default: 8 built-in ones)" in done.stdout
    assert "(default: 4;" in done.stdout


def test_memory_is_read():
    assert limits.available_bytes() > 1 << 20
