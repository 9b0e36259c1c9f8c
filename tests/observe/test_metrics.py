"""Prometheus metrics: what a scrape says is what the Engine counted."""

from __future__ import annotations

import sys
from http.client import HTTPConnection
from typing import Any

import pytest

from kpolicy import Engine
from kpolicy.budgets import Budget
from kpolicy.errors import ConfigError
from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy.observe.metrics import EngineCollector, serve_metrics
from kpolicy.observe.stats import TIME_BOUNDS_US
from kpolicy.reasons import Reason
from kpolicy.registry import GraphRegistry
from kpolicy.shapes import BatchShape
from tests.observe.runs import engine_of, serve

prometheus = pytest.importorskip("prometheus_client")
parser = pytest.importorskip("prometheus_client.parser")

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scraped(engines: Any) -> Samples:
    """Every sample of a scrape, over HTTP, as Prometheus reads it."""
    with serve_metrics(engines, 0) as server:
        assert server.url == f"http://127.0.0.1:{server.port}/metrics"
        return samples_of(fetched(server.port))


def fetched(port: int) -> str:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/metrics")
        reply = connection.getresponse()
        assert reply.status == 200
        return reply.read().decode()
    finally:
        connection.close()


def samples_of(text: str) -> Samples:
    samples: Samples = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            at = (sample.name, tuple(sorted(sample.labels.items())))
            assert at not in samples, f"{at} is there twice"
            samples[at] = sample.value
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"kpolicy_{name}", tuple(sorted(labels.items()))]


def test_a_scrape_says_what_the_engine_counted() -> None:
    """Steps, tokens and padding by mode and reason, graphs, bytes, hits and capture seconds equal the Engine's own."""
    engine = engine_of()
    engine.capture()
    steps = serve(engine)
    samples = scraped(engine)
    assert steps == sum(each for (name, _), each in samples.items() if name == "kpolicy_steps_total")
    for (mode, reason), sums in engine.stats.by_mode_and_reason.items():
        labels = {"policy": "auto", "mode": mode, "reason": reason}
        assert value(samples, "steps_total", **labels) == sums.steps > 0
        assert value(samples, "tokens_total", **labels) == sums.tokens > 0
        assert value(samples, "padding_tokens_total", **labels) == sums.padding
    totals = engine.registry.totals()
    assert value(samples, "graph_bytes", policy="auto") == totals.bytes_held > 0
    assert value(samples, "capture_seconds_total", policy="auto") == pytest.approx(totals.held.seconds)
    assert value(samples, "graphs", policy="auto", state="captured") == len(engine.registry.captured()) > 0
    hits = {record.key: record.hits for record in engine.registry.records() if record.hits}
    for key, count in hits.items():
        assert value(samples, "graph_hits_total", policy="auto", key=str(key)) == count
    assert len(hits) == sum(name == "kpolicy_graph_hits_total" for name, _ in samples) > 0


def test_step_seconds_are_a_histogram_by_mode() -> None:
    """Buckets rise to the count, their bounds are seconds, and the sum is the time of all steps of the mode."""
    engine = engine_of()
    engine.capture()
    serve(engine)
    samples = scraped(engine)
    for mode, stats in engine.stats.by_mode.items():
        buckets = [
            (float(dict(labels)["le"]), count)
            for (name, labels), count in samples.items()
            if name == "kpolicy_step_seconds_bucket" and ("mode", mode) in labels
        ]
        assert [bound for bound, _ in buckets] == pytest.approx([*(us / 1e6 for us in TIME_BOUNDS_US), float("inf")])
        assert [count for _, count in buckets] == sorted(count for _, count in buckets)
        assert buckets[-1][1] == value(samples, "step_seconds_count", policy="auto", mode=mode) == stats.steps
        assert value(samples, "step_seconds_sum", policy="auto", mode=mode) == pytest.approx(stats.us / 1e6)


def test_lost_graphs_and_failed_replays_show() -> None:
    """A graph that fails at replay is counted, moves to the state withdrawn, and its bytes stay held."""
    engine = engine_of("full_and_piecewise", faults=["replay_fails@2"])
    engine.capture()
    serve(engine)
    samples = scraped(engine)
    assert value(samples, "replay_failures_total", policy="full_and_piecewise") >= 1
    assert value(samples, "graphs", policy="full_and_piecewise", state="withdrawn") >= 1
    live = value(samples, "graph_live_bytes", policy="full_and_piecewise")
    assert live < value(samples, "graph_bytes", policy="full_and_piecewise")


def test_eager_halves_are_counted_by_reason() -> None:
    """Halves of splits that ran eagerly are there with their reasons."""
    engine = Engine("split", attention="mla")
    engine.decide(BatchShape(decodes=[(1, 4)], prefills=[(3000, 0)]))
    halves = engine.stats.half_reasons
    assert halves
    samples = scraped(engine)
    for reason, count in halves.items():
        assert value(samples, "eager_halves_total", policy="split", reason=reason) == count


def test_several_engines_share_a_server() -> None:
    """Engines given by name are told apart by the label policy."""
    engines = {"auto": Engine("auto"), "vllm, 2nd": Engine("vllm")}
    engines["auto"].decide(BatchShape.decode(3))
    for _ in range(2):
        engines["vllm, 2nd"].decide(BatchShape.decode(3))
    samples = scraped(engines)
    steps: dict[str, float] = {}
    for (name, labels), count in samples.items():
        if name == "kpolicy_steps_total":
            policy = dict(labels)["policy"]
            steps[policy] = steps.get(policy, 0) + count
    assert steps == {"auto": 1, "vllm, 2nd": 2}


def test_an_engine_that_takes_anothers_place_is_read() -> None:
    """As where a policy has another turn."""
    engines = {"auto": Engine("auto")}
    with serve_metrics(engines, 0) as server:
        assert value(samples_of(fetched(server.port)), "policy_compiles_total", policy="auto") == 0
        engines["auto"] = Engine("auto")
        engines["auto"].decide(BatchShape.decode(3))
        assert value(samples_of(fetched(server.port)), "policy_compiles_total", policy="auto") == 1


def test_keys_that_read_alike_share_a_series() -> None:
    """Two keys with one text don't make a scrape that Prometheus refuses: their hits are added."""
    registry = GraphRegistry(Budget())
    keys = [GraphKey(Part.FULL, 8, stage="draft"), GraphKey(Part.FULL, 8, variant="draft")]
    assert str(keys[0]) == str(keys[1])
    registry.plan(keys)
    for key in keys:
        registry.capture(key, bytes=1, seconds=0.5)
        registry.hit(key, 3)
    samples = scraped(Engine("auto", registry=registry))
    assert value(samples, "graph_hits_total", policy="auto", key=str(keys[0])) == 6


def test_failed_keys_are_counted_by_state() -> None:
    """A failed capture is in the state failed, and its seconds count."""
    registry = GraphRegistry(Budget())
    key = GraphKey(Part.FULL, 8)
    registry.plan([key])
    registry.fail(key, Reason.CAPTURE_FAILED, seconds=2.5)
    samples = samples_of(prometheus.generate_latest(register(Engine("auto", registry=registry))).decode())
    assert value(samples, "graphs", policy="auto", state="failed") == 1
    assert value(samples, "capture_seconds_total", policy="auto") == 2.5


def register(engine: Engine) -> Any:
    registry = prometheus.CollectorRegistry()
    registry.register(EngineCollector(engine))
    return registry


def test_a_closed_server_frees_its_port() -> None:
    """Closing, twice too, stops the server; the port can be had again, and nothing answers meanwhile."""
    server = serve_metrics(Engine("auto"), 0)
    server.close()
    server.close()
    with pytest.raises(ConnectionRefusedError):
        fetched(server.port)
    serve_metrics(Engine("auto"), server.port).close()


def test_a_taken_port_is_a_clear_error() -> None:
    """A port that another server has is named, with what to do."""
    with (
        serve_metrics(Engine("auto"), 0) as server,
        pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{server.port}: .*in use.* Give another port"),
    ):
        serve_metrics(Engine("auto"), server.port)


@pytest.mark.parametrize("port", [-1, 65_536, True, "9400"])
def test_a_port_that_is_none_is_a_clear_error(port: Any) -> None:
    """What can't be a port is refused before anything is opened."""
    with pytest.raises(ConfigError, match=r"port for metrics is .*1 to 65535"):
        serve_metrics(Engine("auto"), port)


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without prometheus-client the error says what to install."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"prometheus-client.*pip install 'kpolicy\[metrics\]'"):
        serve_metrics(Engine("auto"), 0)
