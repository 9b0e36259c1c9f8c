"""Both runners' dispatch on stand-ins of vLLM's classes; test_oracle_dispatch.py has the real ones."""

from enum import Enum
from types import SimpleNamespace
from typing import NamedTuple

import attrs
import numpy as np
import pytest

from kpolicy.attention.support import Claims
from kpolicy.costs import Curve, HostCost, analytic_costs
from kpolicy.modes import Part
from kpolicy.settings import Settings
from kpolicy_vllm.config import Config
from kpolicy_vllm.ladder import one_list, sizes_of
from kpolicy_vllm.runner_v1 import dispatcher_class, grouped
from kpolicy_vllm.runner_v2 import manager_class, take_over
from kpolicy_vllm.state import State

SETTINGS = Settings(max_num_reqs=48, max_num_tokens=1024)


class Mode(Enum):
    """vLLM's modes, as far as they are asked."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_AND_PIECEWISE = (2, 1)

    def separate_routine(self):
        return isinstance(self.value, tuple)

    def decode_mode(self):
        return Mode.FULL

    def mixed_mode(self):
        return Mode.PIECEWISE


@attrs.frozen
class Descriptor:
    """The first runner's key."""

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False
    num_active_loras: int = 0


@attrs.frozen
class Execution:
    """The second runner's descriptor, of 0.23."""

    cg_mode: Mode
    num_tokens: int
    num_reqs: int | None
    uniform_token_count: int | None = None


class Stock(NamedTuple):
    """vLLM's own answer, and what it was asked."""

    cg_mode: Mode
    asked: tuple


class Dispatcher:
    """vLLM's dispatcher: keys of every size, and an answer that tells that it was asked."""

    def __init__(self, config):
        self.compilation_config = config
        self.cudagraph_keys = {Mode.FULL: set(), Mode.PIECEWISE: set()}

    def initialize_cudagraph_keys(self, _mode, _query_len=1):
        for size in self.compilation_config.cudagraph_capture_sizes:
            self.cudagraph_keys[Mode.PIECEWISE].add(Descriptor(size))
            if size <= SETTINGS.max_num_reqs:
                self.cudagraph_keys[Mode.FULL].add(Descriptor(size, size, True))

    def add_cudagraph_key(self, mode, desc):
        self.cudagraph_keys[mode].add(desc)

    def _get_lora_cases(self):
        return [0]

    def _create_padded_batch_descriptor(self, size, uniform, has_lora, loras):
        return Descriptor(size, min(size, SETTINGS.max_num_reqs), uniform, has_lora, loras)

    def get_capture_descs(self):
        found = self.cudagraph_keys.items()
        return [(mode, sorted(descs, key=lambda desc: -desc.num_tokens)) for mode, descs in found]

    def dispatch(self, num_tokens, *_):
        return "stock", num_tokens


class Manager:
    """vLLM's manager of 0.23: descriptors of every size."""

    def __init__(self, config):
        self.compilation_config = config
        self.cudagraph_mode = Mode.FULL_AND_PIECEWISE
        self.decode_query_len = 1
        self.max_num_reqs = SETTINGS.max_num_reqs
        self._graphs_captured = False
        sizes = sorted(config.cudagraph_capture_sizes, reverse=True)
        self._capture_descs = {
            Mode.PIECEWISE: [Execution(Mode.PIECEWISE, size, None) for size in sizes],
            Mode.FULL: [Execution(Mode.FULL, size, size, 1) for size in sizes if size <= SETTINGS.max_num_reqs],
        }

    def capture(self, create_forward_fn):
        for descs in self._capture_descs.values():
            for desc in descs:
                create_forward_fn(desc, warmup=True)
                create_forward_fn(desc, warmup=False)
        self._graphs_captured = True

    def dispatch(self, *asked):
        return Stock(Mode.NONE, asked)


@pytest.fixture
def state():
    """A state of a policy that needs no costs, on attention that captures mixed batches."""
    made = State(Config(policy="full_and_piecewise"), SETTINGS)
    made.claims = Claims.at_level("mixed")
    made.sizes = sizes_of(made.config, SETTINGS)
    return made


def compilation(state):
    return SimpleNamespace(cudagraph_capture_sizes=one_list(state.sizes))


def capture(state, keys):
    for key in keys:
        state.registry.capture(key, bytes=1, seconds=0.0)
    state.graphs_captured()


def first(state):
    """The first runner's dispatcher, everything captured."""
    made = dispatcher_class(Dispatcher, Mode, Descriptor)(compilation(state), state)
    state.dispatcher = made
    made.initialize_cudagraph_keys(Mode.FULL_AND_PIECEWISE)
    return made


def second(state):
    """The second runner's manager, everything captured."""
    manager = Manager(compilation(state))
    state.loras_apart = False
    take_over(manager, state, manager_class(Manager, Manager, Mode, Execution, newest=False))
    return manager


def test_first_keys(state):
    """The first runner's keys are those of the ladders, mixed FULL graphs among them."""
    dispatcher = first(state)
    full = dispatcher.cudagraph_keys[Mode.FULL]
    assert {desc.num_tokens for desc in full if desc.uniform} == set(state.sizes.decode)
    assert {desc.num_tokens for desc in full if not desc.uniform} == set(state.sizes.mixed)
    assert {desc.num_tokens for desc in dispatcher.cudagraph_keys[Mode.PIECEWISE]} == set(state.sizes.piecewise)


def test_first_answers(state):
    """Before the capture vLLM answers; then the policy, save where one mode is asked for."""
    dispatcher = first(state)
    assert dispatcher.dispatch(5, True) == ("stock", 5)
    capture(state, dispatcher.desc_of)
    assert dispatcher.dispatch(5, True) == (Mode.FULL, Descriptor(8, 8, True))
    dispatcher.facts = (3, np.array([1, 1, 60]))
    assert dispatcher.dispatch(62) == (Mode.FULL, Descriptor(64, 48))
    dispatcher.facts = (3, np.array([1, 1, 600]))
    assert dispatcher.dispatch(602) == (Mode.PIECEWISE, Descriptor(640))
    dispatcher.facts = (1, np.array([1100]))
    assert dispatcher.dispatch(1100) == (Mode.NONE, Descriptor(1100))
    assert dispatcher.dispatch(8, True, valid_modes=frozenset({Mode.PIECEWISE})) == (Mode.PIECEWISE, Descriptor(16))
    assert dispatcher.dispatch(5, True, valid_modes=frozenset({Mode.NONE})) == ("stock", 5)
    assert dispatcher.dispatch(5, True, invalid_modes={Mode.FULL}) == (Mode.PIECEWISE, Descriptor(16))


def test_one_mode_is_vllm_s_rule_s():
    """Where vLLM allows one mode, as it does once ranks agreed on a size, no cheaper larger graph is named."""
    state = State(Config(policy="auto", decode_sizes=(8, 16), mixed_sizes=(), piecewise_sizes=(8, 16)), SETTINGS)
    state.claims = Claims.at_level("mixed")
    state.sizes = sizes_of(state.config, SETTINGS)
    cheaper = Curve((8, 16), (5000.0, 2000.0))
    state.timed = state.costs = attrs.evolve(
        analytic_costs(), measured=True, full=cheaper, piecewise=cheaper, host_eager=HostCost(10_000.0)
    )
    dispatcher = first(state)
    capture(state, dispatcher.desc_of)
    assert dispatcher.dispatch(8, True) == (Mode.FULL, Descriptor(16, 16, True))
    assert dispatcher.dispatch(8, True, invalid_modes={Mode.FULL}) == (Mode.PIECEWISE, Descriptor(16))
    assert dispatcher.dispatch(8, True, valid_modes={Mode.FULL}) == (Mode.FULL, Descriptor(8, 8, True))
    assert dispatcher.dispatch(8, True, valid_modes={Mode.PIECEWISE}) == (Mode.PIECEWISE, Descriptor(8))


def test_first_forced(state):
    """A capture is answered with its own graph, and NONE where only that is allowed."""
    dispatcher = first(state)
    graph = (Mode.PIECEWISE, Descriptor(64))
    with dispatcher.forcing(*graph):
        assert dispatcher.dispatch(64) == graph
        assert dispatcher.dispatch(64, valid_modes={Mode.NONE}) == (Mode.NONE, Descriptor(64))
    assert dispatcher.dispatch(64) == ("stock", 64)


def test_first_samples(state):
    """While memory is estimated the smallest graph comes second, and stands for four where there are that many."""
    dispatcher = first(state)
    whole = dict(dispatcher.get_capture_descs())
    dispatcher.sampling = True
    for mode, descs in dispatcher.get_capture_descs():
        sizes = [desc.num_tokens for desc in whole[mode]]
        assert [desc.num_tokens for desc in descs[:2]] == [max(sizes), min(sizes)]
        others = dispatcher.beside.get((mode, descs[1]), [])
        if others:
            assert [descs[1].num_tokens, *(desc.num_tokens for desc in others)] == sorted(sizes)[:4]
            assert 4 * (len(descs) - 1) >= len(sizes) - 1 > 4 * (len(descs) - 2)
        else:
            assert sorted(desc.num_tokens for desc in descs) == sorted(sizes)


def test_groups():
    """Of n graphs vLLM is shown the largest, and one in four of the others."""
    for count in range(1, 60):
        descs = list(range(count, 0, -1))
        listed, others = grouped(descs)
        assert listed[:2] == [count, 1][:count]
        shown = (len(listed) - 1) * (1 + len(others))
        assert count - 1 <= shown < count - 1 + (1 + len(others) if others else 1)
        assert count not in others


def test_the_replica_s_memory_is_estimated_as_stock_s(state):
    """With vLLM's own sizes nothing of the estimate is changed."""
    dispatcher = first(state)
    whole = dispatcher.get_capture_descs()
    state.sizes, dispatcher.sampling = None, True
    assert dispatcher.get_capture_descs() == whole


def test_what_ranks_agreed_on_tells_whether_others_decode(state):
    """A rank without rows votes for one decode: a larger FULL graph is for decodes of another rank."""
    assert not state.others_decode()
    dispatcher = first(state)
    assert not state.others_decode()
    capture(state, dispatcher.desc_of)
    for tokens, mode, decodes in ((1, Mode.FULL, False), (8, Mode.FULL, True), (64, Mode.PIECEWISE, False),
                                  (8, Mode.FULL, True), (600, Mode.NONE, False)):  # fmt: skip
        dispatcher.dispatch(1, True)
        dispatcher.dispatch(tokens, mode is Mode.FULL, valid_modes={mode})
        assert state.others_decode() is decodes


def test_second_runner_s_ranks_likewise(state):
    """The second runner asks its manager again with what ranks agreed on."""
    manager = second(state)
    manager.capture(lambda *_, **__: None)
    capture(state, manager.chooser.desc_of)
    for asked, decodes in (((1, 1, 1), False), ((1, 8, 1), True), ((1, 600, None), False)):
        manager.dispatch(*asked)
        assert state.others_decode() is decodes


def test_second_answers(state):
    """Before the capture vLLM answers; then the policy, by the counts that this runner has."""
    manager = second(state)
    assert manager.dispatch(5, 5, 1) == Stock(Mode.NONE, (5, 5, 1))
    seen = []
    manager.on_capture = lambda desc, seconds: seen.append((desc, seconds))
    manager.capture(lambda *_, **__: None)
    assert [desc for desc, _ in seen] == [desc for descs in manager._capture_descs.values() for desc in descs]
    capture(state, manager.chooser.desc_of)
    assert manager.dispatch(5, 5, 1) == Execution(Mode.FULL, 8, 8, 1)
    assert manager.dispatch(3, 602, None) == Execution(Mode.PIECEWISE, 640, None)
    assert manager.dispatch(3, 1100, None) == Execution(Mode.NONE, 1100, 3)
    mode, desc = manager.desc_of[next(key for key in manager.chooser.desc_of if key.part is Part.PIECEWISE)]
    with manager.forcing(mode, desc):
        assert manager.dispatch(5, 5, 1) == desc


def test_second_looks_up_the_ladders(state):
    """vLLM's own look-up has the next graph of each kind, FULL first."""
    manager = second(state)
    found = manager._candidates[5]
    assert [(desc.cg_mode, desc.num_tokens) for desc in found] == [
        (Mode.FULL, 8), (Mode.FULL, 64), (Mode.PIECEWISE, 16),
    ]  # fmt: skip
    sizes = [desc.num_tokens for desc in manager._capture_descs[Mode.FULL]]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("make", [first, second])
def test_crash_of_the_policy(state, make, caplog):
    """A policy that can't be prepared leaves vLLM's rule over the ladders."""

    class Broken:
        name, summary, reads_costs = "broken", "", False

        def compile(self, _context):
            raise RuntimeError("no")

    dispatcher = make(state)
    state.policy = Broken()
    dispatcher._graphs_captured = True
    capture(state, dispatcher.chooser.desc_of)
    answer = dispatcher.dispatch(5, True) if make is first else dispatcher.dispatch(5, 5, 1)
    desc = answer[1] if make is first else answer
    assert desc.num_tokens == 8
    assert state.counters.counts["policy_failed"] == 1
    assert len(caplog.records) == 1
