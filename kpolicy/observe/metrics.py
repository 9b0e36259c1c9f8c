"""Prometheus metrics of Engines, read from their counters when they are scraped: a batch pays nothing for them.

``serve_metrics(engine, 9400)`` serves them; an application with a `CollectorRegistry` of its own registers
`EngineCollector` there. docs/observe.md lists the metrics. prometheus-client (the extra ``metrics``) loads on first
use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from kpolicy.errors import ConfigError
from kpolicy.observe.extras import load
from kpolicy.observe.stats import TIME_BOUNDS_US, Stats
from kpolicy.registry import GraphRegistry

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["EngineCollector", "MetricsServer", "Observed", "serve_metrics"]


class Observed(Protocol):
    """What is read of an Engine."""

    @property
    def stats(self) -> Stats: ...

    @property
    def registry(self) -> GraphRegistry: ...

    @property
    def policy(self) -> Any: ...


class EngineCollector:
    """Collects the metrics of Engines for a Prometheus registry: ``registry.register(EngineCollector(engine))``.

    Counters are as old as their Engine: they say all that it ever ran, also before this was made. Where Engines share
    a graph registry, each reports all its graphs.

    Args:
        engines: an Engine, or Engines by what the label ``policy`` says of them, read anew each time: one may take
            another's place. The policy's name by default.

    Raises:
        ConfigError: prometheus-client isn't installed.
    """

    def __init__(self, engines: Observed | Mapping[str, Observed]) -> None:
        self._families = _prometheus("prometheus_client.metrics_core")
        self._engines = engines if isinstance(engines, Mapping) else {str(engines.policy.name): engines}

    def describe(self) -> list[Any]:
        """Nothing: registering asks for names only, and every name begins with ``kpolicy_``."""
        return []

    def collect(self) -> Iterator[Any]:
        """Every metric, read now."""
        yield from self._of_steps()
        yield self._of_times()
        yield from self._of_graphs()

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        return self._families.CounterMetricFamily(f"kpolicy_{name}", text, labels=["policy", *labels])

    def _gauge(self, name: str, text: str, *labels: str) -> Any:
        return self._families.GaugeMetricFamily(f"kpolicy_{name}", text, labels=["policy", *labels])

    def _of_steps(self) -> Iterator[Any]:
        steps = self._counter("steps", "Steps.", "mode", "reason")
        tokens = self._counter("tokens", "Tokens computed, without padding.", "mode", "reason")
        padding = self._counter("padding_tokens", "Padding tokens computed.", "mode", "reason")
        halves = self._counter("eager_halves", "Halves of split steps that ran eagerly.", "reason")
        failures = self._counter("replay_failures", "Graphs that failed before their launch.")
        recompiles = self._counter("policy_compiles", "Times the policy was prepared for the captured graphs.")
        for policy, engine in self._engines.items():
            stats = engine.stats
            for (mode, reason), sums in stats.by_mode_and_reason.items():
                for family, value in ((steps, sums.steps), (tokens, sums.tokens), (padding, sums.padding)):
                    family.add_metric([policy, mode, reason], value)
            for reason, count in stats.half_reasons.items():
                halves.add_metric([policy, reason], count)
            failures.add_metric([policy], stats.replay_failures)
            recompiles.add_metric([policy], stats.recompiles)
        yield from (steps, tokens, padding, halves, failures, recompiles)

    def _of_times(self) -> Any:
        family = self._families.HistogramMetricFamily(
            "kpolicy_step_seconds", "Time of a step, as the executor tells it.", labels=["policy", "mode"]
        )
        for policy, engine in self._engines.items():
            for mode, times in engine.stats.times_by_mode.items():
                buckets = [
                    (bound, float(count)) for bound, count in zip(_BOUNDS, accumulate(times.counts), strict=True)
                ]
                family.add_metric([policy, mode], buckets, sum_value=times.sum_us / 1e6)
        return family

    def _of_graphs(self) -> Iterator[Any]:
        graphs = self._gauge("graphs", "Graph keys by state.", "state")
        held = self._gauge("graph_bytes", "Bytes that graphs take, withdrawn ones included until they are evicted.")
        live = self._gauge("graph_live_bytes", "Bytes of the graphs that may be replayed.")
        seconds = self._counter("capture_seconds", "Seconds spent capturing, failed captures included.")
        hits = self._counter("graph_hits", "Replays of a graph.", "key")
        for policy, engine in self._engines.items():
            totals = engine.registry.totals()
            for state, count in totals.keys.items():
                graphs.add_metric([policy, state.value], count)
            held.add_metric([policy], totals.bytes_held)
            live.add_metric([policy], totals.bytes_live)
            seconds.add_metric([policy], totals.held.seconds)
            for key, count in _hits(engine.registry).items():
                hits.add_metric([policy, key], count)
        yield from (graphs, held, live, seconds, hits)


_BOUNDS = (*(str(round(bound / 1e6, 9)) for bound in TIME_BOUNDS_US), "+Inf")


def _hits(registry: GraphRegistry) -> dict[str, int]:
    """Replays by key, as text: two keys that read alike share a series, as a scrape with one twice is refused."""
    hits: dict[str, int] = {}
    for record in registry.records():
        if record.hits:
            hits[str(record.key)] = hits.get(str(record.key), 0) + record.hits
    return hits


class MetricsServer:
    """Metrics that are being served. A context manager: leaving it closes the server.

    Args:
        server: the HTTP server.
        thread: the thread that it runs on.
    """

    def __init__(self, server: Any, thread: Any) -> None:
        self._server = server
        self._thread = thread
        self._closed = False
        self.host: str = server.server_address[0]
        self.port: int = server.server_address[1]

    @property
    def url(self) -> str:
        """Where the metrics are."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop serving and free the port; a second time does nothing."""
        if not self._closed:
            self._closed = True
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve_metrics(engines: Observed | Mapping[str, Observed], port: int, *, host: str = "127.0.0.1") -> MetricsServer:
    """Serve the metrics of Engines over HTTP, on a thread of its own, until the server is closed.

    Args:
        engines: as for `EngineCollector`.
        port: the TCP port; 0 takes a free one, which `MetricsServer.port` says.
        host: the address to listen at; this machine alone by default, ``0.0.0.0`` for all that reach it.

    Raises:
        ConfigError: prometheus-client isn't installed, or the port can't be had.
    """
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65_535:
        raise ConfigError(f"the port for metrics is {port!r}; it takes 1 to 65535, or 0 for any that is free.")
    client = _prometheus("prometheus_client")
    registry = client.CollectorRegistry()
    registry.register(EngineCollector(engines))
    try:
        return MetricsServer(*client.start_http_server(port, addr=host, registry=registry))
    except OSError as error:
        raise ConfigError(
            f"metrics can't be served on {host}:{port}: {error.strerror or error}. Give another port, 0 for any that "
            "is free, or another address of this machine."
        ) from None


def _prometheus(module: str) -> Any:
    return load(module, extra="metrics", package="prometheus-client", what="Serving metrics")
