"""Where a job's model runs. On machines without a GPU the answer is the CPU, or an error that says what is missing."""

import pytest
import torch

from bywash.errors import ConfigError
from bywash.exchange import Link, one_host, open_exchange
from bywash.exchange.host_map import HostMap
from bywash.models import job
from bywash.models.job import job_device, own_device


class Job:
    rank, deadline_s = 0, 1.0

    def __init__(self, *hosts):
        self.ranks = len(hosts)
        self.hosts = HostMap.of(hosts)


@pytest.fixture
def with_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(job, "find_spec", lambda name: object())


@pytest.mark.parametrize(
    ("exchange", "link", "hosts", "expected"),
    [
        ("auto", None, ("a", "a"), "cuda"),
        ("auto", None, None, "cuda"),
        ("auto", None, ("a", "b"), "cpu"),
        ("auto", Link(rate_gbps=100, latency_us=1), ("a", "a"), "cpu"),
        ("shm", None, ("a", "a"), "cpu"),
        ("gloo", None, ("a", "a"), "cpu"),
        ("peer", None, ("a", "a"), "cuda"),
    ],
)
def test_gpus_are_taken_where_their_exchange_can_run(with_gpu, exchange, link, hosts, expected):
    assert job_device(exchange, link, Job(*hosts) if hosts else None) == expected


def test_auto_needs_the_packages_too(with_gpu, monkeypatch):
    monkeypatch.setattr(job, "find_spec", lambda name: None)
    assert job_device("auto", None, None) == "cpu"


def test_hosts():
    assert one_host(Job("a", "a", "a"))
    assert not one_host(Job("a", "a", "b"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu():
    assert job_device("auto", None, None) == "cpu"
    assert own_device("cpu", 3).type == "cpu"
    with pytest.raises(ConfigError, match="no CUDA device is visible; use --exchange shm or gloo"):
        own_device("cuda", 0)


@pytest.mark.parametrize("name", ["shm", "gloo"])
def test_rows_on_gpus_are_not_for_cpu_exchanges(name):
    with pytest.raises(ConfigError, match=f"--exchange {name} moves rows in CPU memory"):
        open_exchange(name, Job("a", "a"), device="cuda")
