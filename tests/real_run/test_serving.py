"""A model under the main job: every request rightly served, whatever the policy and whatever fails."""

from __future__ import annotations

import time
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.costs import CostTable, Curve, HostCost  # noqa: E402
from kpolicy.engine import LOOK_EVERY, Engine  # noqa: E402
from kpolicy.errors import ConfigError  # noqa: E402
from kpolicy.policies import policy_names  # noqa: E402
from kpolicy.reasons import Reason  # noqa: E402
from kpolicy.scheduling.batching import Batcher, Generation  # noqa: E402
from kpolicy.serving.load import load  # noqa: E402
from kpolicy.serving.real_run import Serving, fitting, sampling_of, saturated_s, serve_model  # noqa: E402
from kpolicy.trace_run import Prompts, RunResult  # noqa: E402
from tests.real_run.helpers import LADDER, SETTINGS, TINY, right, some, trace_of  # noqa: E402

PROMPTS = Prompts(seed=5, vocab=97)


def serve(serving: Serving, policy: str = "auto", trace: Any = None, **rest: Any) -> RunResult:
    """Capture and serve; requests are held to transformers unless `check` says otherwise."""
    engine = serving.engine(policy)
    engine.capture()

    def check(request: Generation) -> bool:
        return right(serving.model, request.tokens[: request.num_prompt].tolist(), request.generated)

    rest.setdefault("check", check)
    try:
        result, differences = serve_model(trace or some(), engine, serving, PROMPTS, label=policy, **rest)
    finally:
        engine.release()
    assert differences == ()
    return result


@pytest.mark.parametrize("policy", sorted(policy_names()))
def test_every_policy_serves_rightly(serving: Serving, policy: str) -> None:
    """Every request has the tokens of transformers' generate, and every step is EAGER's to the bit."""
    result = serve(serving, policy)
    assert (result.served, result.checked, result.wrong, result.refused) == (8, 8, (), {})
    for mode, stats in result.modes.items():
        assert result.verified[mode].checks == min(stats.steps, 50)
        assert result.verified[mode].failures == 0
    assert result.verified.keys() == result.modes.keys()


@pytest.mark.parametrize("form", ["in_turn", "beside", "decodes_beside"])
def test_each_form_of_split_serves_rightly(serving: Serving, form: str) -> None:
    """Halves in turn, beside each other, and several decode steps beside one prompt chunk all give EAGER's outputs."""
    result = serve(serving, f"split:form={form}", some(12))
    assert result.wrong == ()
    assert any(mode.startswith("split") for mode in result.modes)
    assert all(each.failures == 0 for each in result.verified.values())


def test_the_clock_is_the_walls_without_checks(serving: Serving) -> None:
    """The run's time holds the executor's and what is outside of it, and neither checks nor idle time."""
    engine = serving.engine("full_and_piecewise")
    engine.capture()
    apart = trace_of((0.0, 5, 3), (1000.0, 5, 3))
    took: list[float] = []

    def slow(*_: Any) -> None:
        time.sleep(0.05)
        took.append(0.05)

    result, _ = serve_model(apart, engine, serving, PROMPTS, on_step=slow)
    engine.release()
    assert result.span_s > 1000
    assert result.wall_s < 60
    assert result.outside_us > 0
    assert result.outside_us + result.step_us < result.wall_s * 1e6 - sum(took) * 1e6


def test_preemption_computes_again(model: Any) -> None:
    """With KV for two requests of three, what is preempted is computed again and ends with the same tokens."""
    serving = Serving(model=model, settings=SETTINGS)
    result = serve(serving, "auto", trace_of(*((0.0, 30, 30) for _ in range(4))))
    assert result.preemptions > 0
    assert (result.served, result.wrong) == (4, ())


def test_a_request_longer_than_the_kv_is_handed_back(serving: Serving) -> None:
    """What can never fit is counted by reason, and the others are served."""
    result = serve(serving, trace=trace_of((0.0, 5, 3), (0.0, 120, 40), (0.0, 4, 2)))
    assert result.refused == {"over_kv_capacity": 1}
    assert (result.served, result.wrong) == (2, ())


def test_requests_over_the_models_positions_are_left_out(model: Any) -> None:
    """A trace is cut to what the model has positions for, with a counted reason."""
    kept = fitting(trace_of((0.0, 100, 5), (0.0, 500, 5)), model)
    assert len(kept) == 1
    assert kept.dropped == {"over_max_tokens": 1}


def test_so_many_tokens_of_a_trace_are_served(model: Any) -> None:
    """Of the requests that fit the model the first within the tokens are taken, at least one; the source says so."""
    trace = trace_of((0.0, 10, 5), (0.0, 500, 5), (0.1, 6, 4), (0.2, 8, 2), (0.3, 1, 1))
    taken = {tokens: fitting(trace, model, most_tokens=tokens) for tokens in (1, 15, 24, 25, 36, 37, 1000)}
    assert [len(each) for each in taken.values()] == [1, 1, 1, 2, 3, 4, 4]
    assert taken[25].source.endswith("a request, first 2 requests")
    assert taken[25].dropped == {"over_max_tokens": 1}
    assert taken[37] == fitting(trace, model)


def test_a_cancelled_request_is_counted(serving: Serving) -> None:
    """A request that is cancelled while it runs leaves; the others are served rightly."""

    def cancel(step: int, _inputs: Any, _outputs: Any, batcher: Any, _start: float) -> None:
        if step == 2:
            assert batcher.cancel(batcher.running[0].index)

    result = serve(serving, on_step=cancel)
    assert result.refused == {"cancelled": 1}
    assert (result.served, result.wrong) == (7, ())


def test_a_thousand_waiting_requests(serving: Serving) -> None:
    """A thousand requests at once wait their turn, and each is served."""
    result = serve(serving, "auto", trace_of(*((0.0, 1 + i % 5, 1 + i % 2) for i in range(1000))), check=None)
    assert result.served == 1000
    assert all(each.checks >= 50 and each.failures == 0 for each in result.verified.values() if each.checks > 20)


def test_an_interrupt_keeps_what_was_done(serving: Serving) -> None:
    """Ctrl-C in a step ends the run with its counts."""

    def stop(step: int, *_: Any) -> None:
        if step == 6:
            raise KeyboardInterrupt

    result = serve(serving, on_step=stop)
    assert result.interrupted == "interrupted from the keyboard"
    assert 0 < result.steps <= 7


@pytest.mark.parametrize(
    "fault",
    [
        "capture_fails@2", "capture_out_of_memory@1", "mid_segment@3", "replay_fails@4x2", "before_launch@5",
        "staging_fails@20",
    ],
)  # fmt: skip
@pytest.mark.parametrize("policy", ["full_and_piecewise", "split:form=beside"])
def test_faults_cost_no_request(model: Any, policy: str, fault: str) -> None:
    """After a failed capture or replay every request is still served rightly, and the failure is counted."""
    result = serve(Serving(model=model, settings=SETTINGS, faults=(fault,)), policy)
    assert (result.served, result.wrong) == (8, ())
    assert sum(result.not_captured.values()) + result.replay_failures > 0


def test_a_lost_device_hands_requests_back(model: Any) -> None:
    """A sticky error ends the run; served and handed back are all requests."""
    result = serve(Serving(model=model, settings=SETTINGS, faults=("sticky@6",)), "full_and_piecewise")
    assert result.interrupted
    assert result.served + result.refused["device_lost"] == 8
    assert result.wrong == ()


RISING = Curve((1, 64), (100.0, 740.0))
RISES = CostTable(
    version="made up", measured=True, full=RISING, piecewise=RISING, eager=RISING, host_full=HostCost(1.0),
    host_piecewise=HostCost(1.0), host_eager=HostCost(1.0),
)  # fmt: skip
"""Each token takes 10 us, so that only the gap is a reason for short steps"""


@pytest.mark.parametrize(("pace", "most"), [(None, 16), ("eager", 4)])
def test_a_model_is_served_in_bounded_steps(serving: Serving, pace: str | None, most: int) -> None:
    """Steps that have decodes hold fewer prompt tokens by costs and objective, and every request is rightly served."""
    bounded = attrs.evolve(serving, pace=pace, costs=RISES, objective="0:1:4")
    beside: list[int] = []

    def tell(_index: int, inputs: Any, *_: Any) -> None:
        numbers = inputs.numbers
        if numbers.num_decodes and numbers.num_prefills:
            beside.append(numbers.total_tokens)

    trace = trace_of((0.0, 3, 30), *((0.0, 60, 2) for _ in range(4)))
    result = serve(bounded, "piecewise", trace, on_step=tell)
    assert (result.served, result.wrong) == (5, ())
    assert max(beside) == most


def test_a_pace_needs_the_engine_that_serves(serving: Serving) -> None:
    with pytest.raises(ConfigError, match=r"pace is 'vllm', which goes by an Engine's graphs and costs; give batcher"):
        attrs.evolve(serving, pace="vllm").batcher()


def test_sampling_depends_on_the_request_alone(serving: Serving) -> None:
    """With a temperature each request gets the same tokens under any policy, and others than greedy ones."""
    got: dict[str, dict[int, list[int]]] = {}
    for name, temperature in (("eager", 0.9), ("full_and_piecewise", 0.9), ("full", 0.0)):
        tokens = got.setdefault(name, {})

        def keep(request: Generation, tokens: dict[int, list[int]] = tokens) -> bool:
            tokens[request.index] = request.generated
            return True

        serve(serving, name, check=keep, temperature=temperature, seed=4)
    assert got["eager"] == got["full_and_piecewise"]
    assert got["eager"] != got["full"]


def test_sampling_inputs_are_as_long_as_what_is_wanted(serving: Serving) -> None:
    """Decode rows and prompts that end have a seed and a temperature each; chunks that don't end have none."""
    batcher = serving.batcher()
    batcher.add(Generation(7, [1] * 20, 4))
    batcher.add(Generation(8, [1] * 3, 4))
    fill = sampling_of(0.5, 1)
    assert fill is not None
    batch = batcher.next_batch()
    assert batch is not None
    assert len(fill(batch)["seed"]) == len(batch.inputs.wanted) == 0
    assert sampling_of(0.0, 1) is None


def test_saturated_time_grows_with_the_work(serving: Serving) -> None:
    """Twice the requests take about twice as long when all wait from the start."""
    engine = serving.engine("auto")
    costs = engine.costs
    once, twice = (
        saturated_s(some(n), engine, costs, num_blocks=32, block_size=4) for n in (40, 80)
    )  # fmt: skip
    assert 1.6 < twice / once < 2.4


def test_a_weight_that_moved_is_found_on_a_cpu_too() -> None:
    """Steps that are over at once are counted as others: within some hundred of them all graphs are withdrawn."""
    model = load(TINY, num_blocks=16, max_num_reqs=4, max_model_len=64)
    engine = Engine("full", model=model, ladder=LADDER, settings=SETTINGS, calibrate=0)
    engine.capture()

    def step() -> tuple[str, Any]:
        batcher = Batcher(SETTINGS, num_blocks=16)
        batcher.add(Generation(0, [3, 5, 7], 2))
        outputs = engine.step(batcher.next_batch().inputs)  # type: ignore[union-attr]
        return outputs.decision.label, torch.stack(list(outputs.outputs))

    try:
        before, _ = step()
        module = model.hf.model.layers[0].mlp.down_proj
        module.weight = torch.nn.Parameter(-module.weight, requires_grad=False)
        modes = [step()[0] for _ in range(LOOK_EVERY + 1)]
        assert (before, modes[-1]) == ("full", "eager")
        wanted = model.reference_logits([3, 5, 7])[-1:]
        torch.testing.assert_close(step()[1], wanted, atol=1e-4, rtol=0)
        reasons = {record.reason for record in engine.registry.records()}
        assert reasons == {Reason.ADDRESS_CHANGED}
        engine.capture()
        assert step()[0] == "full"
        torch.testing.assert_close(step()[1], wanted, atol=1e-4, rtol=0)
    finally:
        engine.release()
