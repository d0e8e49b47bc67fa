"""What bywash counts, as Prometheus metrics inside somebody else's process: vLLM, SGLang, or one's own.

Exchanges that serve engines report here by themselves (`watch`). `register` adds all of it to a `prometheus_client`
registry, so that an engine that exposes its registry exposes these as well. Workers that are processes of their own
have registries of their own: in prometheus_client's multi-process mode (PROMETHEUS_MULTIPROC_DIR set before it is
imported) numbers go through its files; otherwise `serve` gives each rank a port. Needs prometheus-client only for
`register` and `serve`; `text` does without.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from itertools import count
from typing import Any
from weakref import WeakSet

from bywash.errors import ConfigError

Source = Callable[[], Mapping[str, float]]
PREFIX = "bywash_"
PUBLISH_EVERY = 256
"""Steps of an engine between two updates of its files."""
_sources: dict[int, tuple[Source, dict[str, str]]] = {}
_numbers = count()
_registries: WeakSet[Any] = WeakSet()
_lock = threading.Lock()


def watch(source: Source, **labels: str) -> Callable[[], None]:
    """Report what `source` returns (names to sums since the start) until the returned function is called."""
    with _lock:
        number = next(_numbers)
        _sources[number] = (source, labels)
    return lambda: _forget(number)


def text() -> str:
    """All counters now, in Prometheus text format."""
    lines, seen = [], set()
    for name, labels, value in sorted(_counters(), key=lambda counter: (counter[0], sorted(counter[1].items()))):
        if name not in seen:
            seen.add(name)
            lines.append(f"# TYPE {PREFIX}{name}_total counter")
        inside = ",".join(f'{key}="{label}"' for key, label in sorted(labels.items()))
        lines.append(f"{PREFIX}{name}_total{{{inside}}} {int(value) if value.is_integer() else value}")
    return "\n".join(lines) + "\n" if lines else ""


def register(registry: Any = None) -> None:
    """Add all counters, also those that come later, to a registry; by default prometheus_client's own.

    Once is enough: a registry that has them already is left alone.

    Raises:
        ConfigError: prometheus-client is not installed.
    """
    try:
        from prometheus_client import REGISTRY
        from prometheus_client.core import CounterMetricFamily
    except ImportError as error:
        raise ConfigError("metrics: pip install 'bywash[metrics]' (prometheus-client is missing)") from error
    registry = REGISTRY if registry is None else registry
    if registry in _registries:
        return

    class Bywash:
        """Asks the sources whenever somebody asks for metrics."""

        def collect(self) -> Iterator[Any]:
            families: dict[str, Any] = {}
            for name, labels, value in _counters():
                keys = sorted(labels)
                if name not in families:
                    families[name] = CounterMetricFamily(PREFIX + name, f"bywash: {name}", labels=keys)
                families[name].add_metric([labels[key] for key in keys], value)
            yield from families.values()

    registry.register(Bywash())
    _registries.add(registry)


def serve(port: int, host: str = "127.0.0.1") -> ThreadingHTTPServer:
    """Answer GET /metrics on `port` with `text`, in a thread of its own; 0 takes any free port.

    Raises:
        ConfigError: the port cannot be had.
    """
    try:
        server = ThreadingHTTPServer((host, port), _Handler)
    except OSError as error:
        raise ConfigError(f"metrics port {port}: {error.strerror or error}; choose another") from error
    threading.Thread(target=server.serve_forever, daemon=True, name="bywash-metrics").start()
    return server


class Publisher:
    """Copies counters into prometheus_client's multi-process files, for an engine that reads those of its workers."""

    def __init__(self) -> None:
        self._metrics: dict[str, Any] = {}
        self._last: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._published_at = 0

    def keep_up(self, steps: int) -> None:
        """`publish`, if `PUBLISH_EVERY` of the engine's `steps` or more have gone by since it was done last."""
        if steps - self._published_at >= PUBLISH_EVERY:
            self._published_at = steps
            self.publish()

    def publish(self) -> None:
        """Bring the files up to date: cheap, a few additions."""
        from prometheus_client import Counter

        for name, labels, value in _counters():
            if name not in self._metrics:
                self._metrics[name] = Counter(PREFIX + name, f"bywash: {name}", sorted(labels))
            key = (name, tuple(sorted(labels.items())))
            last = self._last.get(key, 0.0)
            # A sum that has fallen is of an exchange that was closed and opened anew: it counts from 0 again.
            self._metrics[name].labels(**labels).inc(value - last if value >= last else value)
            self._last[key] = value


def inside_engine(rank: int) -> Publisher | None:
    """Make the counters reachable from inside an engine's worker, the way the environment asks for.

    With BYWASH_METRICS_PORT on that port plus the rank; with PROMETHEUS_MULTIPROC_DIR through its files, by the
    returned `Publisher`; otherwise through this process's own registry. The last two if prometheus-client is installed:
    without it there is nobody who could ask.

    Raises:
        ConfigError: a port that is no number or cannot be had.
    """
    port = port_of(rank)
    if port is not None:
        serve(port)
        return None
    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        return Publisher() if find_spec("prometheus_client") else None
    if find_spec("prometheus_client"):
        register()
    return None


def port_of(rank: int) -> int | None:
    """The port that BYWASH_METRICS_PORT gives this rank; None where it is not set. Raises `ConfigError`: no number."""
    port = os.environ.get("BYWASH_METRICS_PORT", "")
    if not port:
        return None
    if not port.isdecimal() or not 0 < int(port) + rank < 65536:
        raise ConfigError(f"BYWASH_METRICS_PORT={port}: a port number is needed, with room for the ranks above it")
    return int(port) + rank


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = self.path.split("?")[0] in ("/metrics", "/")
        body = text().encode() if found else b"only /metrics is here\n"
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: an engine's log is not ours."""


def _counters() -> list[tuple[str, dict[str, str], float]]:
    """Each name with each set of labels once: what several sources report under both is added."""
    with _lock:
        sources = list(_sources.values())
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for source, labels in sources:
        for name, value in source().items():
            key = (name, tuple(sorted(labels.items())))
            sums[key] = sums.get(key, 0.0) + value
    return [(name, dict(labels), value) for (name, labels), value in sums.items()]


def _forget(number: int) -> None:
    with _lock:
        _sources.pop(number, None)
