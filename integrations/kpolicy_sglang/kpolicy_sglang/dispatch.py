"""The hooks that a step goes through: whether it replays. SGLang's own functions are called for all but the size.

Between two steps an engine touches more memory than caches hold, so that what a hook costs goes by what it touches. A
runner's own attribute is therefore a function by itself, which asks SGLang and counts, where no more is to be done.
Where SGLang's rule is one that is known, and says yes to just such a batch, see `kpolicy_sglang.rules`, it counts only.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import Any

from kpolicy.reasons import Reason
from kpolicy_sglang.bound import bind, names_of, wrapped_by
from kpolicy_sglang.phase import EAGER, PREFILL, REPLAYS, Phase
from kpolicy_sglang.refused import has_idle_rank, why_refused
from kpolicy_sglang.rules import known_rule

__all__ = [
    "attach",
    "decode_can_run",
    "detach",
    "phase_of",
    "prefill_can_replay_locally",
    "prefill_can_run",
    "prefill_can_run_0_5_16",
]

ATTRIBUTE = "_kpolicy_phase"
_NO_LIMIT = 1 << 40
_FACTOR = "_MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR"
_RUNS, _QUESTION = "can_run_graph", "can_replay_locally"


def phase_of(runner: Any) -> Phase | None:
    """The phase of a graph runner that kpolicy is attached to."""
    return getattr(runner, ATTRIBUTE, None)


def attach(runner: Any, phase: Phase) -> None:
    """Have a graph runner's steps decided by a phase."""
    setattr(runner, ATTRIBUTE, phase)
    for hook in (decode_can_run, prefill_can_run, prefill_can_run_0_5_16):
        own = wrapped_by(runner, _RUNS, hook)
        if own is not None:
            decodes = hook is decode_can_run
            if not decodes:
                _find_limit(phase, own, runner)
            holds = _known(phase, own, runner)
            if holds is None:
                made = _decode_asked if decodes else _prefill_asked
            else:
                made = _decode_told if decodes else _prefill_told
            bind(runner, _RUNS, made(phase, own, runner, inspect.unwrap(hook)), holds=holds)
    if phase.names and not phase.coupled:
        # The runner before this one was asked so.
        _past_hook(runner)


def detach(runner: Any) -> None:
    """Leave them to SGLang."""
    for name in (ATTRIBUTE, _RUNS, _QUESTION):
        getattr(runner, "__dict__", {}).pop(name, None)


def _known(phase: Phase, own: Any, runner: Any) -> Callable[[Any], bool] | None:
    """What tells of a runner whether its yes is known as it is now; None where it isn't now."""
    try:
        usual = known_rule(runner, own, phase.sizes, _inside)
    # SGLang is asked then, each time.
    except Exception as error:  # noqa: BLE001
        phase.failures.note("looking at SGLang's rule", error, then="SGLang is asked each time")
        return None
    if usual is None:
        return None
    names = phase.names or {}
    limit = names.get(_FACTOR)
    return lambda now: usual(now) and names.get(_FACTOR) in (limit, _NO_LIMIT)


def _inside(runner: Any, name: str) -> Callable[..., Any] | None:
    """What kpolicy's hook on a runner's method is around, but for the one on `can_run_graph`."""
    return wrapped_by(runner, name, prefill_can_replay_locally) if name == _QUESTION else None


def _decode_told(phase: Phase, own: Any, runner: Any, answer: Callable[..., Any]) -> Callable[[Any], Any]:
    """A decode runner's `can_run_graph` where SGLang's rule is known: it says yes to a batch that has nothing else."""
    plain, steps, most = phase.plain, phase.steps, phase.largest

    def can_run_graph(forward_batch: Any) -> Any:
        size = forward_batch.batch_size
        if (
            size <= most
            and plain[size]
            and forward_batch.replace_embeds is None
            and forward_batch.spec_info is None
            and not forward_batch.capture_hidden_mode
        ):
            steps[size] += 1
            return True
        return answer(phase, own, runner, forward_batch)

    return can_run_graph


def _prefill_told(phase: Phase, own: Any, runner: Any, answer: Callable[..., Any]) -> Callable[[Any], Any]:
    """The same of a prefill runner."""
    plain, steps, most = phase.plain, phase.steps, phase.largest

    def can_run_graph(forward_batch: Any) -> Any:
        size = forward_batch.input_ids.numel()
        if (
            size <= most
            and plain[size]
            and forward_batch.global_num_tokens_cpu is None
            and forward_batch.input_embeds is None
            and forward_batch.replace_embeds is None
            and forward_batch.capture_hidden_mode is runner.capture_hidden_mode
            and not forward_batch.forward_mode.is_target_verify()
        ):
            steps[size] += 1
            return True
        return answer(phase, own, runner, forward_batch)

    return can_run_graph


def _decode_asked(phase: Phase, own: Any, runner: Any, answer: Callable[..., Any]) -> Callable[[Any], Any]:
    """A decode runner's `can_run_graph`: SGLang's own yes of a size that is only counted, else the hook's answer."""
    plain, steps, most = phase.plain, phase.steps, phase.largest

    def can_run_graph(forward_batch: Any) -> Any:
        size = forward_batch.batch_size
        if size <= most and plain[size]:
            can_run = own(runner, forward_batch)
            if can_run:
                steps[size] += 1
                return can_run
        return answer(phase, own, runner, forward_batch)

    return can_run_graph


def _prefill_asked(phase: Phase, own: Any, runner: Any, answer: Callable[..., Any]) -> Callable[[Any], Any]:
    """The same of a prefill runner. Ranks that vote, which the batch tells, have no such size."""
    plain, steps, most = phase.plain, phase.steps, phase.largest

    def can_run_graph(forward_batch: Any) -> Any:
        size = forward_batch.input_ids.numel()
        if size <= most and plain[size] and forward_batch.global_num_tokens_cpu is None:
            can_run = own(runner, forward_batch)
            if can_run:
                steps[size] += 1
                return can_run
        return answer(phase, own, runner, forward_batch)

    return can_run_graph


def _hook(answer: Callable[[Phase, Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """AROUND a `can_run_graph`: the answer of a runner that has a phase, and SGLang's own without."""

    @wraps(answer)
    def around(original: Any, runner: Any, forward_batch: Any) -> Any:
        phase: Phase | None = getattr(runner, ATTRIBUTE, None)
        return original(runner, forward_batch) if phase is None else answer(phase, original, runner, forward_batch)

    return around


@_hook
def decode_can_run(phase: Phase, original: Any, runner: Any, forward_batch: Any) -> Any:
    """AROUND `DecodeCudaGraphRunner.can_run_graph`."""
    if phase.force is not None:
        return phase.force
    size = forward_batch.batch_size
    if runner.require_mlp_sync:
        # The vote was taken when the step was scheduled; ranks that gather their rows pad to the most of any.
        most = max([size, *(forward_batch.global_num_tokens_cpu or ())])
        return _as_voted(phase, runner, forward_batch, original(runner, forward_batch), size, most)
    if phase.verdict(size) == EAGER:
        phase.ran(size, forward_batch)
        return False
    can_run = original(runner, forward_batch)
    if can_run:
        phase.ran_plainly(size, forward_batch)
        return can_run
    return _refused(phase, runner, forward_batch, size)


@_hook
def prefill_can_run_0_5_16(phase: Phase, original: Any, runner: Any, forward_batch: Any) -> Any:
    """AROUND `PrefillCudaGraphRunner.can_run_graph` of 0.5.16, which has the limit on padding inside."""
    if phase.force is not None:
        return phase.force
    if forward_batch.global_num_tokens_cpu is not None:
        # This version votes before it knows sizes: a rank that decided on its own could part from the others.
        most = forward_batch.input_ids.numel()
        can_run = original(runner, forward_batch)
        return _as_voted(phase, runner, forward_batch, can_run, _own(forward_batch), most, own=False)
    size = forward_batch.input_ids.numel()
    verdict = phase.verdict(size)
    if verdict == EAGER:
        phase.ran(size, forward_batch)
        return False
    ask, ran = original, phase.ran_plainly
    if verdict != REPLAYS:
        ask, ran = partial(_without_limit, phase, original), phase.ran
    can_run = ask(runner, forward_batch)
    if can_run:
        ran(size, forward_batch)
        return can_run
    return _refused(phase, runner, forward_batch, size)


def _without_limit(phase: Phase, original: Any, runner: Any, forward_batch: Any) -> Any:
    """SGLang's answer without its limit on padding; a limit that isn't found stays."""
    if phase.names is None:
        _find_limit(phase, original, runner)
        if phase.names is None:
            phase.names = {}
            missing = LookupError(f"SGLang's rule has no {_FACTOR}")
            phase.failures.note("lifting SGLang's limit on padding", missing, then="the limit stays")
        elif not phase.coupled:
            _past_hook(runner)
    names = phase.names
    limit = names.get(_FACTOR)
    names[_FACTOR] = _NO_LIMIT
    try:
        return original(runner, forward_batch)
    finally:
        names[_FACTOR] = limit


def _find_limit(phase: Phase, rule: Any, runner: Any) -> None:
    """Look for SGLang's limit on padding once: what is within it is told by size before a step asks."""
    if phase.names is None and (names := _names(runner, rule)):
        phase.names = names
        phase.limited(names[_FACTOR])


def _names(runner: Any, rule: Any) -> dict[str, Any]:
    """The names among which SGLang's rule looks up its limit on padding; none where it isn't found."""
    module = sys.modules.get(type(runner).__module__)
    for found in (names_of(rule), vars(module) if module is not None else {}):
        if _FACTOR in found:
            return found
    return {}


@_hook
def prefill_can_run(phase: Phase, original: Any, runner: Any, forward_batch: Any) -> Any:
    """AROUND `PrefillCudaGraphRunner.can_run_graph` of 0.5.23, which asks `can_replay_locally`, and ranks vote by that.

    Where nobody votes the size is decided here, and SGLang asks its own question without the limit on padding: kpolicy
    has nothing to add to it, and a further hook would take as long again.
    """
    if phase.force is not None:
        return phase.force
    size = forward_batch.input_ids.numel()
    phase.refusal = None
    if forward_batch.global_num_tokens_cpu is not None:
        phase.agreed = True
        try:
            can_run = original(runner, forward_batch)
        finally:
            phase.agreed = False
        return _as_voted(phase, runner, forward_batch, can_run, _own(forward_batch), size)
    verdict = phase.verdict(size)
    if verdict == EAGER:
        phase.ran(size, forward_batch)
        return False
    ask, ran = original, phase.ran_plainly
    if verdict != REPLAYS:
        ask, ran = partial(_without_limit, phase, original), phase.ran
    can_run = ask(runner, forward_batch)
    if can_run:
        ran(size, forward_batch)
        return can_run
    return _refused(phase, runner, forward_batch, size, again=partial(_asked_by_hook, original, runner, forward_batch))


def _past_hook(runner: Any) -> None:
    """Have this runner ask what our hook on `can_replay_locally` is around."""
    own = wrapped_by(runner, _QUESTION, prefill_can_replay_locally)
    if own is not None:
        bind(runner, _QUESTION, MethodType(own, runner))


def _asked_by_hook(original: Any, runner: Any, forward_batch: Any) -> None:
    """Ask what SGLang said no to once more, with our hook noting what was asked."""
    own = runner.__dict__.pop(_QUESTION, None)
    if own is not None:
        try:
            original(runner, forward_batch)
        finally:
            setattr(runner, _QUESTION, own)


def prefill_can_replay_locally(original: Any, runner: Any, **asked: Any) -> bool:
    """AROUND `PrefillCudaGraphRunner.can_replay_locally`: the vote and the step itself both ask it.

    Under data parallelism the step's batch is padded to what ranks agreed on, so that only the vote decides by size.
    """
    phase: Phase | None = getattr(runner, ATTRIBUTE, None)
    size = asked.get("num_tokens")
    if phase is None or size is None:
        return bool(original(runner, **asked))
    if size > phase.largest if phase.agreed else not phase.replays(size):
        phase.refusal = Reason.ABOVE_LARGEST_SIZE
        return False
    # Without a size SGLang checks all the rest, and no limit on padding.
    asked["num_tokens"] = None
    if original(runner, **asked):
        # A no after this yes is its attention backend's.
        phase.refusal = Reason.BACKEND_REFUSED
        return True
    phase.refusal = partial(original, runner), asked
    return False


def _own(batch: Any) -> int:
    """This rank's prompt tokens of a batch that is padded to what ranks agreed on."""
    lengths = getattr(batch, "extend_seq_lens_cpu", None)
    return sum(map(int, lengths)) if lengths else int(batch.input_ids.numel())


def _as_voted(phase: Phase, runner: Any, batch: Any, can_run: Any, size: int, most: int, *, own: bool = True) -> Any:
    """Count what ranks agreed on: the answer is theirs, whatever the policy says of this rank's size.

    Args:
        phase: the phase.
        runner: SGLang's graph runner.
        batch: its batch.
        can_run: the answer.
        size: this rank's size.
        most: the size that ranks pad from.
        own: whether the policy's own no was in the vote, so that its reason is the step's.
    """
    captured = phase.bucket(most)
    if can_run and captured is not None:
        phase.ran_as_voted(size, captured, batch)
    elif not can_run and own and phase.wants_eager(size):
        phase.refusal = None
        phase.ran(size, batch)
    elif not can_run:
        phase.was_refused(size, batch, _why(phase, runner, batch))
    return can_run


def _refused(phase: Phase, runner: Any, batch: Any, size: int, *, again: Callable[[], None] | None = None) -> bool:
    """Count a no of SGLang's: its own, unless the size is eager by the policy.

    Args:
        phase: the phase.
        runner: SGLang's graph runner.
        batch: its batch.
        size: its size.
        again: what has the question noted that was said no to, where it wasn't.
    """
    if phase.replays(size):
        phase.was_refused(size, batch, _why(phase, runner, batch, again))
    else:
        phase.ran(size, batch)
    return False


def _why(phase: Phase, runner: Any, batch: Any, again: Callable[[], None] | None = None) -> Reason:
    """Why SGLang said no, as far as it can be told."""
    try:
        if again is not None:
            again()
        reason = why_refused(phase.name, runner, batch, phase.refusal)
        if reason is Reason.RANK_NEEDS_EAGER and phase.name == PREFILL and has_idle_rank(batch):
            phase.idle_rank = True
        return reason
    # The answer is SGLang's already; only its reason is looked for.
    except Exception as error:  # noqa: BLE001
        phase.failures.note("looking for SGLang's reason", error, then="the step counts as backend_refused")
        return Reason.BACKEND_REFUSED
    finally:
        # It has the batch's tensors.
        phase.refusal = None
