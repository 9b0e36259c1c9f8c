"""Gives a runner under vLLM-Kunlun kpolicy's decisions and ladder, and shows each FULL graph at warm-up that it holds.

vLLM-Kunlun runs vLLM's own first runner, so dispatch is attached as on CUDA. Attention there takes lengths on the
host, which a graph may have kept: so after the captures made-up rows go through the runner, each graph's own, longer
and shorter than captured, in other blocks and of other numbers. `KunlunGraphWrapper` runs them beside eager ones and
trusts or refuses the graph; the policy then plans without those refused.

Unverified on hardware.
"""

from __future__ import annotations

from typing import Any

import attrs

from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy.reasons import Reason
from kpolicy_vllm import attach_v1, kunlun
from kpolicy_vllm.calibrate import why_not
from kpolicy_vllm.published import with_published_costs
from kpolicy_vllm.state import LOGGER, State
from kpolicy_vllm.synthetic import Rows, Steps
from kpolicy_vllm.timing import together
from kpolicy_vllm.versions import UnsupportedError
from kpolicy_vllm.versions.names import Names

__all__ = ["attach", "rows_to_show", "show"]


def attach(runner: Any, state: State, modules: Names | None = None) -> None:
    """Give vLLM's first runner on a Kunlun card kpolicy's decisions.

    Args:
        runner: vLLM's `GPUModelRunner`, before it has loaded its model.
        state: what kpolicy knows of this vLLM.
        modules: the names of vLLM's that the version's adapter found.

    Raises:
        UnsupportedError: it is the second runner, whose FULL graphs no wrapper of vLLM-Kunlun's sees.
    """
    if hasattr(runner, "cudagraph_manager"):
        raise UnsupportedError(
            "this is vLLM's second runner, whose FULL graphs nothing tries on a Kunlun card; set "
            "VLLM_USE_V2_MODEL_RUNNER=0."
        )
    # Calibration keeps the device busy in CUDA's way; here costs come from a profile, or from figures.
    state.config = attrs.evolve(state.config, calibrate=False)
    # Where kpolicy is on by vLLM's configuration alone, `register` couldn't know.
    kunlun.tell_platform()
    kunlun.use_wrapper(runner)
    names = modules or Names.of_v1()
    attach_v1.attach(runner, state, attrs.evolve(names, num_pieces=_num_pieces))
    with_published_costs(runner, state, "Kunlun P800")
    _try_after_captures(runner, state)


def _num_pieces(desc: Any) -> int:
    """Pieces captured for a descriptor's size."""
    return sum(
        any(entry.num_tokens == desc.num_tokens for entry in wrapper.concrete_cudagraph_entries)
        for wrapper in kunlun.KunlunGraphWrapper.made
        if wrapper.runtime_mode.name == "PIECEWISE"
    )


def _try_after_captures(runner: Any, state: State) -> None:
    capture = runner.capture_model

    def capture_model(*args: Any, **named: Any) -> Any:
        again = state.started  # it may be serving, and made-up rows would write over requests' KV
        result = capture(*args, **named)
        wrapper = runner.model
        if not hasattr(wrapper, "probation"):
            return result
        if wrapper.probation and not again and why_not(runner) is None:
            ranks = "steps of serving try its FULL graphs"
            with state.guard("not_tried", "trying FULL graphs over made-up rows", ranks):
                show(runner, state)
        refused = dict(wrapper.refused)
        with state.guard("not_withdrawn", "taking back FULL graphs that were refused", "they run eagerly"):
            _withdraw(state, refused)
        if not _stages(runner):
            wrapper.on_refused = lambda desc, why: _withdraw(state, {desc: why})
        if wrapper.probation:
            LOGGER.info("kpolicy: %d FULL graphs prove themselves while serving", len(wrapper.probation))
        return result

    runner.capture_model = capture_model


def _stages(runner: Any) -> bool:
    """Whether pipeline stages decide for themselves: each has a wrapper, and all must run at one size."""
    return bool(getattr(runner.vllm_config.parallel_config, "pipeline_parallel_size", 1) > 1)


def rows_to_show(key: GraphKey, captured: tuple[int, ...], longest: int) -> list[Rows]:
    """The rows that a FULL graph of decodes is shown: longer, fewer and longer, much longer, and as short as can be.

    Args:
        key: the graph's.
        captured: the lengths it was captured with.
        longest: most tokens that a row may attend to.
    """
    q = key.query_len or 1
    most, reqs = max(captured, default=q), key.num_tokens // q
    room = max(0, longest - most)
    found = [
        Rows(reqs, most + max(1, room // 8), query_len=q),
        Rows(max(1, reqs - 1), most + max(2, room // 4), query_len=q),
        Rows(reqs, most + max(3, room // 2), query_len=q),
    ]
    if min(captured, default=q) > q + 1:
        found.append(Rows(reqs, q + 1, query_len=q))
    return found


def show(runner: Any, state: State) -> None:
    """Run each FULL graph on probation over made-up rows; its wrapper judges. Nothing is left in the runner."""
    wrapper, dispatcher = runner.model, state.dispatcher
    steps = together(state.agree, Steps, runner)

    def run(mode: Any, desc: Any, rows: Rows) -> None:
        with dispatcher.forcing(mode, desc):
            runner.execute_model(steps.step(rows))
            runner.sample_tokens(None)

    try:
        for key, (mode, desc) in list(dispatcher.desc_of.items()):
            trial = wrapper.probation.get(desc) if key.part is Part.FULL else None
            for rows in rows_to_show(key, trial.captured.lengths, steps.longest) if trial is not None else ():
                if desc not in wrapper.probation or not steps.fits(rows):
                    continue
                together(state.agree, run, mode, desc, rows)
    finally:
        runner.execute_model_state = None
        runner.execute_model(steps.close())


def _withdraw(state: State, refused: dict[Any, str]) -> None:
    """Have the policy decide without those graphs from now on."""
    dispatcher = state.dispatcher
    kept = dict(dispatcher.desc_of)
    for key, (mode, desc) in dispatcher.desc_of.items():
        if key.part is Part.FULL and desc in refused:
            failed = "capture failed" in refused[desc]
            state.registry.withdraw(key, Reason.CAPTURE_FAILED if failed else Reason.HOST_LENGTHS_FROZEN)
            dispatcher.cudagraph_keys[mode].discard(desc)
            del kept[key]
            state.counters.add("graphs_refused")
    if len(kept) < len(dispatcher.desc_of):
        dispatcher.chooser.set_keys(kept)
        state.recompile()
