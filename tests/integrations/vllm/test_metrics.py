"""Counters on vLLM's metrics page, of workers in this process and in others."""

import json
import os
import threading
import weakref
from types import SimpleNamespace

import pytest

from kpolicy_vllm import metrics, plugin
from kpolicy_vllm.state import Counters
from kpolicy_vllm.steps import Step
from kpolicy_vllm.versions import UnsupportedError
from kpolicy_vllm.watch import Watch
from tests.integrations.vllm.test_dispatch import chooser


@pytest.fixture
def state(tmp_path, monkeypatch):
    """A worker that has run four steps, two of them above every graph."""
    monkeypatch.setattr(metrics.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(metrics, "_COLLECTOR", [])
    made = chooser()
    for step in (Step(5, 5, 5, 1, 1), Step(5, 5, 5, 1, 1), Step(1100, 1, 0), Step(1200, 1, 0)):
        made.entry(step).count += 1
    made.state.counters.add("policy_failed", 3)
    made.state.dispatcher = SimpleNamespace(chooser=made)
    return made.state


def samples(collector):
    """Every sample, by name and labels."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in collector.collect()
        for sample in family.samples
    }


def held(found):
    """What both ways of telling must have."""
    label = ("policy", "full_and_piecewise")
    steps = {
        ("mode", "full"): 2.0,
        ("mode", "eager"): 2.0,
    }
    for mode, count in steps.items():
        reason = ("reason", "graph_fits" if mode[1] == "full" else "above_largest_size")
        assert found["kpolicy_steps_total", mode, label, reason] == count
    assert found["kpolicy_padding_tokens_total", ("mode", "full"), label, ("reason", "graph_fits")] == 6
    assert found["kpolicy_vllm_events_total", ("event", "policy_failed"), label] == 3
    hits = [value for (name, *_), value in found.items() if name == "kpolicy_graph_hits_total"]
    assert hits == [2.0]


def test_in_this_process(state):
    """A worker beside the page is read when it is scraped."""
    collector = metrics.Collector()
    collector.states["one"] = weakref.ref(state)
    held(samples(collector))


def test_in_another_process(state):
    """A worker elsewhere leaves a file, which says the same."""
    metrics.Publisher(state, "one", 0)()
    collector = metrics.Collector()
    collector.states["one"] = None
    held(samples(collector))


def test_ranks_apart(state):
    """Each data-parallel rank has a label of its own."""
    for rank in (0, 1):
        metrics.Publisher(state, "one", rank)()
    collector = metrics.Collector()
    collector.states["one"] = None
    labels = {dict(labels)["policy"] for (_, *labels) in samples(collector)}
    assert labels == {"full_and_piecewise", "full_and_piecewise dp1"}
    for rank in range(12):
        metrics.Publisher(state, "one", rank)()
    ranks = [label.partition(" dp")[2] for label, _ in collector._workers()]
    assert ranks == ["", *map(str, range(1, 12))]
    (metrics.folder() / "one.dp0 copy.json").write_bytes((metrics.folder() / "one.dp0.json").read_bytes())
    assert [label.partition(" dp")[2] for label, _ in collector._workers()] == ranks
    (metrics.folder() / "one.dp0.json").unlink()
    (metrics.folder() / "one.dp3.json").write_text("{")
    assert {label.partition(" dp")[2] for label, _ in collector._workers()} == {*map(str, range(1, 12))} - {"3"}


def test_nothing_yet(state):
    """Before a worker has told anything, and where a file is broken, the page is without."""
    collector = metrics.Collector()
    collector.states["one"] = None
    assert list(collector.collect()) == []
    (metrics.folder() / "one.dp0.json").write_text("{")
    assert list(collector.collect()) == []


def test_published_is_json(state):
    """What is left in the file is plain."""
    told = json.loads(json.dumps(metrics.published(state)))
    assert sorted(told["steps"]) == [["eager", "above_largest_size", 2, 2300, 0], ["full", "graph_fits", 2, 10, 6]]


def test_publisher_only_where_needed(state, monkeypatch):
    """Where the page is in the worker's own process no file is written."""
    from prometheus_client import REGISTRY

    registered = []
    monkeypatch.setattr(REGISTRY, "register", registered.append)
    metrics.announce("one")
    metrics.announce("one")
    assert len(registered) == 1
    assert metrics.publisher(state, "one", 0) is None
    assert isinstance(metrics.publisher(state, "two", 0), metrics.Publisher)
    monkeypatch.setattr("os.getpid", lambda: -1)
    assert isinstance(metrics.publisher(state, "one", 0), metrics.Publisher)


def test_a_forked_process_leaves_all_to_the_other(state, monkeypatch, caplog):
    """A child that ends says nothing of the parent's steps, and leaves the parent's file."""
    publisher, watch = metrics.Publisher(state, "one", 0), Watch(state)
    publisher()
    pid = os.getpid()
    with caplog.at_level("INFO", logger="vllm.kpolicy"):
        with monkeypatch.context() as child:
            child.setattr("os.getpid", lambda: -1)
            watch.stop()
            metrics._removed(publisher.path, pid)
        assert publisher.path.exists()
        assert not caplog.records
        watch.stop()
        metrics._removed(publisher.path, pid)
    assert not publisher.path.exists()
    assert len(caplog.records) == 1


def test_who_stops_the_thread_waits_for_what_it_writes(state, monkeypatch):
    """Else the file of an engine that ended would be written anew once it was taken away."""
    monkeypatch.setattr("kpolicy_vllm.watch.TICK_S", 0.01)
    begun, wrote = threading.Event(), []

    def publish():
        begun.set()
        ended.wait(0.05)
        wrote.append("written")

    ended = threading.Event()
    watch = Watch(state, publish)
    watch.start()
    assert begun.wait(5.0)
    watch.stop()
    written = len(wrote)
    assert written
    assert not watch._thread.is_alive()


def test_two_who_count_hits_count_each_once(state):
    """The thread that sums up, and the one that serves the metrics page in this process."""
    chooser, registry = state.dispatcher.chooser, state.registry
    others = []

    class Registry:
        def hit(self, key, times):
            if not others:
                others.append(threading.Thread(target=chooser.count_hits))
                others[0].start()
                others[0].join(0.1)
            registry.hit(key, times)

    state.registry = Registry()
    chooser.count_hits()
    others[0].join()
    state.registry = registry
    chooser.count_hits()
    assert sum(record.hits for record in registry.records()) == 2


def test_watch_says_what_is_new(state, caplog):
    """The summary line has the steps since the last, and nothing where there were none."""
    watch = Watch(state)
    with caplog.at_level("INFO", logger="vllm.kpolicy"):
        assert watch.say(60.0).startswith("4 steps in 60 s: ")
        assert watch.say(60.0) == ""
        state.dispatcher.chooser.entry(Step(700, 1, 0)).count += 1
        assert "1 steps in 1 s: piecewise 100.0%" in watch.say(1.0)
    assert len(caplog.records) == 2


def test_folder_of_another_user(state, monkeypatch, tmp_path):
    """Nothing is left in, or read from, a folder that another user made."""
    metrics.Publisher(state, "one", 0)()
    collector = metrics.Collector()
    collector.states["one"] = None
    assert list(collector.collect())
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setattr(metrics.tempfile, "gettempdir", lambda: str(other))
    (other / f"kpolicy-vllm-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="another user's"):
        metrics.folder()
    assert list(collector.collect()) == []


def test_sums_hold_while_answers_are_dropped(state):
    """The thread that sums up never sees a step twice, nor fewer than before."""
    chooser, step = state.dispatcher.chooser, Step(5, 5, 5, 1, 1)
    told, ended = [], threading.Event()

    def watch():
        while not ended.is_set():
            told.append(sum(count for count, *_ in chooser.tallies().values()))

    thread = threading.Thread(target=watch)
    thread.start()
    before = sum(count for count, *_ in chooser.tallies().values())
    for _ in range(2000):
        chooser.entry(step).count += 1
        chooser._fold()
    ended.set()
    thread.join()
    assert told == sorted(told)
    assert sum(count for count, *_ in chooser.tallies().values()) == before + 2000


def test_another_vllm_is_on_the_page(monkeypatch):
    """Nothing of it is touched, and an operator who looks sees why."""
    client = pytest.importorskip("prometheus_client")
    registry, counts = client.CollectorRegistry(), Counters()
    monkeypatch.setattr(client, "REGISTRY", registry)
    monkeypatch.setattr(metrics, "_COLLECTOR", [])
    for module in (metrics, plugin):
        monkeypatch.setattr(module, "PROCESS", counts)

    def unknown():
        raise UnsupportedError("this is vLLM 0.34.0")

    monkeypatch.setattr(plugin, "adapter", unknown)
    plugin.register()
    assert b'kpolicy_vllm_events_total{event="other_vllm",policy=""} 1.0' in client.generate_latest(registry)
