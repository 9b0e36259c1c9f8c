"""What `kpolicy run` writes and serves for those who watch: events, metrics, traces."""

from __future__ import annotations

import logging
import re
import sys
import urllib.request
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Command

turns_module: Any = import_module("kpolicy.cli.turns")


def test_events_go_to_standard_error(kpolicy: Command, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """$KPOLICY_LOG prints events of its level and above, one line each, and nothing else changes."""
    structlog = pytest.importorskip("structlog")
    plain = kpolicy("run", "--trace", trace, "--policy", "auto", "--fault", "replay_fails@5")
    monkeypatch.setenv("KPOLICY_LOG", "warning")
    warned = kpolicy("run", "--trace", trace, "--policy", "auto", "--fault", "replay_fails@5")
    assert plain.err == ""
    assert warned.out == plain.out
    assert "kpolicy.replay_failed" in warned.err
    assert "kpolicy.graph_captured" not in warned.err
    monkeypatch.setenv("KPOLICY_LOG", "info")
    assert "kpolicy.graph_captured" in kpolicy("run", "--trace", trace, "--policy", "auto").err
    structlog.reset_defaults()


def test_events_without_structlog(kpolicy: Command, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where structlog isn't installed the standard library's logging prints them."""
    monkeypatch.setitem(sys.modules, "structlog", None)
    monkeypatch.setenv("KPOLICY_LOG", "warning")
    monkeypatch.setattr(logging.root, "handlers", [*logging.root.handlers])
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("kpolicy").addHandler(handler)
    try:
        kpolicy("run", "--trace", trace, "--policy", "auto", "--fault", "replay_fails@5")
    finally:
        logging.getLogger("kpolicy").removeHandler(handler)
    assert any(line.startswith("kpolicy.replay_failed") for line in logged)


def test_names_in_the_progress_bar_are_no_markup() -> None:
    """A policy's name with brackets is shown as it is."""
    with turns_module.progress_bar("requests", quiet=True) as shown:
        shown.add_task("auto[red]:x=1")
        assert shown.columns[0].render(shown.tasks[0]).plain == "auto[red]:x=1"


def test_a_level_that_is_none(kpolicy: Command, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A level that isn't known is an error that lists those that are."""
    monkeypatch.setenv("KPOLICY_LOG", "loud")
    ended = kpolicy("run", "--trace", trace)
    assert ended.code == 2
    assert "'loud'" in ended.err
    assert "debug, error, info, warning" in ended.err


def test_metrics_of_all_policies_are_served(kpolicy: Command, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the run lasts each policy's counters can be scraped, and they are those of the result."""
    pytest.importorskip("prometheus_client")
    from kpolicy.observe import metrics

    served: list[Any] = []
    serve = metrics.serve_metrics
    monkeypatch.setattr(metrics, "serve_metrics", lambda *given: served.append(serve(*given)) or served[-1])
    scraped: list[str] = []
    close = metrics.MetricsServer.close

    def scrape(self: Any) -> None:
        if not scraped:
            with urllib.request.urlopen(self.url, timeout=10) as answer:  # noqa: S310 - this machine's
                scraped.append(answer.read().decode())
        close(self)

    monkeypatch.setattr(metrics.MetricsServer, "close", scrape)
    report = kpolicy("run", "--trace", trace, "--metrics-port", 0, "--json").json
    for result in report["policies"]:
        lines = re.findall(rf'^kpolicy_steps_total{{.*policy="{result["policy"]}".*}} ([0-9.]+)$', scraped[0], re.M)
        assert sum(map(float, lines)) == result["steps"]


def test_a_perfetto_trace_a_policy(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """Each policy writes its own trace, beside its step log."""
    pytest.importorskip("perfetto")
    files = ("--perfetto", tmp_path / "r.pftrace", "--step-log", tmp_path / "s.jsonl")
    assert kpolicy("run", "--trace", trace, *files).code == 0
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == ["r-auto.pftrace", "r-vllm.pftrace", "s-auto.jsonl", "s-vllm.jsonl", "trace.csv"]
    assert (tmp_path / "r-auto.pftrace").stat().st_size > 10_000
