import json
import subprocess
import sys

import pytest
import torch

from bywash.balance import Placement
from bywash.bench.by_hand import by_hand_step
from bywash.bench.exchange import fake_experts
from bywash.cli.bench import sizes_between
from bywash.cli.main import app
from bywash.cli.units import gigabits, microseconds, parse_link
from bywash.errors import BywashError, ConfigError
from bywash.routing import Routing


def test_sizes_step_as_nccl_tests_do():
    assert sizes_between(16, 1024, 64) == (16, 1024)
    assert sizes_between(8, 100, 3) == (8, 24, 72)
    assert sizes_between(5, 5, 1) == (5,)
    for begin, end, factor in ((0, 4, 2), (8, 4, 2), (1, 4, 1)):
        with pytest.raises(ConfigError):
            sizes_between(begin, end, factor)


def test_units():
    assert gigabits("200Gbps", "--link") == 200
    assert gigabits("500 Mbps", "--link") == 0.5
    assert microseconds("5us", "--latency") == 5
    assert microseconds("1.5ms", "--latency") == 1500
    assert gigabits("200gbps", "--link") == gigabits("200Gb/s", "--link") == 200
    for text in ("25GB/s", "25GBps", "25MB/s", "25GiB/s"):
        with pytest.raises(ConfigError, match="B means bytes; give bits per second"):
            gigabits(text, "--link")
    link = parse_link("25Gbps", "")
    assert (link.rate_gbps, link.latency_us) == (25, 0)
    for text in ("", "200", "fast", "-1Gbps", "1 parsec"):
        with pytest.raises(ConfigError, match="--link"):
            gigabits(text, "--link")


def run_by_hand(group, seed):
    generator = torch.Generator().manual_seed(seed + group.rank)
    tokens = 3 * group.rank + 1
    x = torch.randn(tokens, 8, generator=generator)
    ids = torch.rand(tokens, 6, generator=generator).topk(3, dim=1).indices
    routing = Routing(ids_TK=ids, weights_TK=torch.rand(tokens, 3, generator=generator), num_experts=6)
    out = by_hand_step(x, routing, Placement.equal(6, group.ranks), fake_experts(6))
    expected = sum(routing.weights_TK[:, k, None] * x * (1 + ids[:, k, None] / 6) for k in range(3))
    return float((out - expected).abs().max())


def test_the_by_hand_baseline_is_right(pools):
    assert max(pools(3).run(run_by_hand, 5)) < 1e-6


@pytest.mark.parametrize("combine", ["exact", "stable", "fast"])
def test_bench_exchange_reports_every_algorithm_and_finds_nothing_wrong(tmp_path, combine, capfd):
    file = tmp_path / "b.json"
    sizes = ["-b", "4", "-e", "16", "-f", "4"]
    shape = ["--ranks", "2", "--hidden", "64", "--experts", "8", "--topk", "2", "--rounds", "3"]
    app(["bench", "exchange", *shape, *sizes, "--combine", combine, "--json", str(file)], standalone_mode=False)
    rows = json.loads(file.read_text())["rows"]
    assert [(row["tokens"], row["algorithm"]) for row in rows] == [
        (tokens, name) for tokens in (4, 16) for name in ("shm", "gloo", "by_hand")
    ]
    for row in rows:
        assert row["wrong"] == 0
        assert row["time_us_median"] > 0
        assert row["logical_bytes"] == 2 * row["tokens"] * 2 * 64 * 4
        if row["algorithm"] == "gloo":
            assert row["ratio_to_dedup_gloo"] == 1
        if row["algorithm"] == "by_hand":
            assert row["ratio_to_by_hand"] == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--topk", "9", "--experts", "8"], "--topk 9: there are only 8 experts"),
        (["--hidden", "0"], "--hidden 0"),
        (["-b", "9", "-e", "3"], "-b 9 -e 3"),
        (["--combine", "x"], "--combine x: choose one of exact, stable, fast"),
        (["--ranks", "0"], "--ranks 0"),
        (["--json", "/no/such/dir/b.json"], "--json /no/such/dir/b.json"),
        (["--zipf", "-1"], "--zipf -1"),
        (["--hidden", "100000000000"], "x --hidden 100000000000 x 4 bytes"),
        (["--experts", "100000000000000"], "of memory are available"),
        (["--link", "1Mbps"], "a message of up to 67,108,864 bytes takes 537 s"),
    ],
)
def test_bench_mistakes_are_named(args, message):
    with pytest.raises(ConfigError) as caught:
        app(["bench", "exchange", *args], standalone_mode=False)
    assert message in str(caught.value)


def test_bench_refuses_to_run_under_torchrun(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="run it without torchrun"):
        app(["bench", "exchange"], standalone_mode=False)


def test_bench_prints_its_json_and_keeps_the_table_apart():
    shape = ["--ranks", "1", "--hidden", "8", "--experts", "8", "--topk", "2", "--rounds", "1", "-b", "4", "-e", "4"]
    command = [sys.executable, "-m", "bywash", "bench", "exchange", *shape, "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert len(json.loads(done.stdout)["rows"]) == 3
    assert "algorithm" in done.stderr


def explained(capfd, *args):
    app(["bench", "exchange", "--explain", *args], standalone_mode=False)
    return capfd.readouterr().out


def test_explain_shows_what_gpus_would_take_and_why_without_any(capfd, tmp_path):
    file = tmp_path / "e.json"
    shape = ["--hidden", "7168", "--experts", "256", "--dtype", "bfloat16", "--combine", "fast"]
    sizes = ["-b", "128", "-e", "4096", "-f", "32"]
    text = explained(capfd, *shape, *sizes, "--ranks", "4", "--json", str(file))
    assert "calculated, not measured" in text
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 2 * 2 * 2
    assert sum(row["taken"] for row in rows) == 4
    assert all(row["arithmetic"] in text for row in rows)
    assert all((row["why"] is not None) == row["taken"] for row in rows)
    assert text.count("taken: ") == 2  # one algorithm for both halves of each size


def test_explain_to_a_full_disk_is_named_as_elsewhere(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        with pytest.raises(BywashError, match=r"^stdout: cannot write to it: No space left"):
            app(["bench", "exchange", "--explain"], standalone_mode=False)


def test_explain_knows_exact_skew_and_slow_links(capfd):
    shape = ["--hidden", "64", "--experts", "16", "--topk", "4", "-b", "64", "-e", "64", "--ranks", "4"]
    assert "the only way: `exact`" in explained(capfd, *shape)
    uniform, skewed = (explained(capfd, *shape, "--zipf", zipf).splitlines()[4] for zipf in ("0", "5"))
    assert int(skewed.split()[3]) < int(uniform.split()[3])  # hot experts share ranks, so a token reaches fewer
    slow = explained(capfd, *shape, "--link", "25Gbps", "--latency", "5us")
    assert "a link of 25 Gb/s, 5 us" in slow
    assert "/ 3.125 GB/s" in slow
