"""The hooks of start-up and of the scheduler. Those that each step asks are in `kpolicy_sglang.dispatch`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import kpolicy_sglang
from kpolicy.errors import KPolicyError
from kpolicy.settings import Settings
from kpolicy_sglang import dispatch
from kpolicy_sglang.arguments import attention_dp, data_parallel_rank, device_name, rank, resolved
from kpolicy_sglang.bound import bind, wrapped_by
from kpolicy_sglang.captures import collected_once, needs_one_warm_up
from kpolicy_sglang.config import Config
from kpolicy_sglang.metrics import Metrics
from kpolicy_sglang.mirror import leave, mirror
from kpolicy_sglang.padding import clear_in_graphs, leave_tails, leaves_attention_out, take_tails
from kpolicy_sglang.phase import DECODE, PREFILL, Phase
from kpolicy_sglang.ranks import Ranks
from kpolicy_sglang.split import counted, split_of
from kpolicy_sglang.state import State, attach, detach, state_of
from kpolicy_sglang.votes import speak_for

__all__ = [
    "capture_prefill_graph",
    "clears_in_graphs",
    "configure",
    "configured",
    "decode_backend",
    "init_cuda_graphs",
    "mla_rule_0_5_16",
    "new_batch_prefill",
    "own_largest",
    "prefill_backend",
]

logger = logging.getLogger(__name__)
MLA_CHECKED = ("triton",)
"""Attention backends whose MLA prefill was checked on a GPU, graph against eager: benchmarks/sglang/check.py."""
_NEW_BATCH = "get_new_batch_prefill"
_now: dict[str, Any] = {"config": None, "version": "", "server_args": None, "own_largest": None, "said": set()}


def configure(config: Config | None, version: str = "") -> None:
    """Set what the hooks of this process do; None makes every one of them call SGLang's own function alone."""
    _now.update(config=config, version=version, server_args=None, own_largest=None, said=set())
    speak_for(None)


def configured() -> Config | None:
    """The settings of this process."""
    found: Config | None = _now["config"]
    return found


def note_deployment(server_args: Any, own_largest: int | None = None) -> None:
    """Keep whose arguments are resolved: 0.5.23 asks for prefill sizes without them, after it asked all else.

    Args:
        server_args: the arguments.
        own_largest: SGLang's own largest decode size, before kpolicy sets another.
    """
    _now.update(server_args=server_args, own_largest=own_largest)


def own_largest(server_args: Any) -> int | None:
    """SGLang's own largest decode size for these arguments; None where it wasn't kept, or isn't known yet."""
    found: int | None = _now["own_largest"]
    return found if _now["server_args"] is server_args else None


def deployment() -> Any:
    """The arguments that were kept; None where none were."""
    return _now["server_args"]


# Start-up rules


def mla_rule_0_5_16(original: Any, server_args: Any) -> Any:
    """AROUND the start-up rules that turn prefill graphs off: without the one for MLA, with all others.

    0.5.16 turns them off because the graph takes another attention path than an eager step; later versions don't.
    What is cheaper is decided by tokens, so the graph may be there. Results were checked with the attention backends
    of `MLA_CHECKED`; with another one, or where SGLang is left to choose, the user has to ask for it.
    """
    config = configured()
    if config is None or config.mla_prefill is False or refusal(server_args):
        return original(server_args)
    backend = server_args.prefill_attention_backend or server_args.attention_backend
    if config.mla_prefill is None and backend not in MLA_CHECKED:
        if server_args.use_mla_backend():
            logger.info(
                "kpolicy: SGLang's rule keeps MLA prefill eager: graphs were checked with --attention-backend %s, and "
                "it is %s here; KPOLICY_MLA_PREFILL=1 has them all the same",
                " or ".join(MLA_CHECKED), backend or "open",
            )  # fmt: skip
        return original(server_args)
    of_class = type(server_args).use_mla_backend
    try:
        # The rules ask the object, so the answer is put there for the time of the call.
        object.__setattr__(server_args, "use_mla_backend", lambda: False)
        return original(server_args)
    finally:
        object.__delattr__(server_args, "use_mla_backend")
        assert type(server_args).use_mla_backend is of_class  # noqa: S101


# Capture


def init_cuda_graphs(original: Any, model_runner: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `ModelRunner.init_cuda_graphs`: attach before the captures, decide after them."""
    config = configured()
    if config is None or model_runner.is_draft_worker:
        return original(model_runner, *args, **kwargs)
    reason = refusal(model_runner.server_args)
    if reason:
        fail(reason)
        return original(model_runner, *args, **kwargs)
    if not _started_alike(model_runner, config):
        return original(model_runner, *args, **kwargs)
    state = State(config, str(_now["version"]))
    attach(model_runner, state)
    with collected_once(model_runner, on=config.quick_capture) as state.savings:
        result = original(model_runner, *args, **kwargs)
    try:
        take_up(model_runner, state)
    # Whatever goes wrong here costs speed: SGLang has its graphs, and its own rule for them.
    except Exception as error:
        _detach(model_runner)
        said = str(error)
        if not isinstance(error, KPolicyError):
            logger.exception("kpolicy: taking up SGLang's graphs raised what it shouldn't")
            said = f"{type(error).__name__}: {error}."
        fail(f"{said} SGLang's own rule decides")
    return result


def _started_alike(model_runner: Any, config: Config) -> bool:
    """Whether ranks, which may be on several nodes, have the same settings.

    Raises:
        SystemExit: they would capture graphs of different sizes, and wait for each other for ever.
    """
    graphs = getattr(resolved(model_runner.server_args), "cuda_graph_config", None)
    sizes = {
        f"{name} sizes": tuple(getattr(getattr(graphs, name, None), "bs", None) or ()) for name in (DECODE, PREFILL)
    }
    here = {**sizes, **config.deciding, "kpolicy-sglang": kpolicy_sglang.__version__}
    ranks = Ranks(model_runner)
    if ranks.several:
        # One that isn't hooked never answers.
        logger.info(
            "kpolicy: comparing settings with the other tensor-parallel ranks; where this is the last line, one of "
            "them runs without kpolicy: set KPOLICY_SGLANG on every node, or on none"
        )
    names, first = ranks.differing(here)
    if not names:
        return True
    told = "; ".join(f"{name}: {here.get(name)} here, {first[name]} on rank 0" for name in names)
    message = f"tensor-parallel ranks were started differently ({told}); give every node the same settings and package"
    if any(name in sizes for name in names):
        raise SystemExit(f"kpolicy: {message}")
    fail(f"{message}. SGLang's own rules stay")
    return False


def take_up(model_runner: Any, state: State) -> None:
    """Set up the phases over what was captured, and install costs."""
    from kpolicy_sglang.calibrate import cost_tables

    ranks = Ranks(model_runner)
    ranks.together(lambda: _phases(model_runner, state), "taking up its graphs")
    missing = [name for name, captured in _captured(model_runner).items() if not captured]
    if len(missing) == 1:
        state.say(f"SGLang has no {missing[0]} graphs here, so that {missing[0]} steps are left to it")
    elif missing:
        fail("SGLang captured no graphs here, so that there is nothing to decide; SGLang's own rules stay")
    if state.phases:
        started = time.perf_counter()
        tables = cost_tables(model_runner, state, ranks)
        for phase in state.phases.values():
            phase.forget_steps()
        ranks.together(lambda: state.install(tables), "setting up the policy")
        state.measuring_s = time.perf_counter() - started
        live = state.registry.totals().live
        logger.info(
            "kpolicy: %d graphs, %.0f MiB, %.1f s; %s decides after %.1f s of measuring",
            live.graphs, live.bytes / 2**20, live.seconds, _policies(state), state.measuring_s,
        )  # fmt: skip
        try:
            _observe(model_runner, state)
        # The first rank alone counts and logs: were it to fall back for that, ranks would part.
        except Exception as error:  # noqa: BLE001
            state.metrics = None
            state.say(f"there are no counters or no log: {type(error).__name__}: {error}")
    state.serving.append(True)


def _captured(model_runner: Any) -> dict[str, bool]:
    """Whether SGLang has graphs, by phase."""
    decode, prefill = model_runner.decode_cuda_graph_runner, model_runner.prefill_cuda_graph_runner
    return {DECODE: hasattr(decode, "capture_bs"), PREFILL: bool(getattr(prefill, "capture_num_tokens", None))}


def _phases(model_runner: Any, state: State) -> None:
    """The phases over what was captured."""
    decode, prefill = model_runner.decode_cuda_graph_runner, model_runner.prefill_cuda_graph_runner
    # Without decode graphs there is no runner to ask.
    state.coupled = bool(getattr(decode, "require_mlp_sync", attention_dp(model_runner.server_args) > 1))
    if hasattr(decode, "capture_bs"):
        width = decode.captured_req_width
        speak_for(model_runner)
        most = max(decode.capture_bs[-1], model_runner.req_to_token_pool.size)
        if width == 1:
            _take(state, decode, Phase(DECODE, decode.capture_bs, most, full=True))
        else:
            state.say("decodes with drafts go by SGLang's own rule; kpolicy decides prefill batches only")
    if hasattr(prefill, "capture_num_tokens") and prefill.capture_num_tokens:
        most = max(prefill.capture_num_tokens[-1], resolved(model_runner.server_args).chunked_prefill_size or 0)
        full = prefill.prefill_backend_name == "full"
        _take(state, prefill, Phase(PREFILL, prefill.capture_num_tokens, most, full=full))
        state.prefix_is_eager = state.version.startswith("0.5.16") and bool(prefill.has_mha_companion_layers)


def _policies(state: State) -> str:
    """The policy of each phase, in words."""
    return ", ".join(f"{phase.policy} ({name})" for name, phase in state.phases.items())


def _observe(model_runner: Any, state: State) -> None:
    """Set up the counters and the log that the settings ask for, on the first of the ranks with the same requests."""
    args, config = resolved(model_runner.server_args), state.config
    if rank(model_runner, "attn_tp_rank"):
        return
    replica = data_parallel_rank(model_runner)
    if config.metrics and args.enable_metrics:
        try:
            state.metrics = Metrics(dp_rank=replica)
        except ModuleNotFoundError:
            state.say("prometheus-client isn't installed, so there are no counters; install kpolicy-sglang[metrics]")
    if config.decision_log is not None:
        from kpolicy_sglang.decision_log import DecisionLog

        settings = Settings(
            max_num_reqs=min(model_runner.req_to_token_pool.size, 1 << 16),
            max_num_tokens=max(args.chunked_prefill_size or 1, *(phase.largest for phase in state.phases.values())),
        )
        try:
            log = DecisionLog(
                config.decision_log if replica is None else f"{config.decision_log}.dp{replica}",
                version=state.version,
                model=str(args.model_path),
                policy=config.policy,
                settings=settings,
                phases=state.phases,
                device=device_name(model_runner) or str(getattr(model_runner, "device", "")),
            )
        except KPolicyError as error:
            fail(f"no decision log: {error}")
            return
        state.decision_log = log
        for phase in state.phases.values():
            phase.log = log.write


def _take(state: State, runner: Any, phase: Phase) -> None:
    state.phases[phase.name] = phase
    phase.failures, phase.coupled = state.failures, state.coupled
    _attach(state, runner, phase)


def _attach(state: State, runner: Any, phase: Phase) -> None:
    """Have a runner's steps decided by the phase, and its padding cleared the quicker way."""
    dispatch.attach(runner, phase)
    state.held.setdefault(phase.name, {})["runner"] = runner
    if _quick_padding(state):
        try:
            take_tails(runner, state.failures)
        # Whatever isn't as it is known to be, SGLang's own way is there.
        except Exception as error:  # noqa: BLE001
            state.failures.note("looking at what padding clears", error, then="SGLang clears it by itself")


def _quick_padding(state: State) -> bool:
    """Whether padding is cleared the quicker way: what clears it is hooked in one version."""
    return state.config.quick_padding and state.version.startswith("0.5.16")


def clears_in_graphs(state: State, backend: Any, runner: Any) -> bool:
    """Whether prompts' graphs of a backend are made to clear attention's output."""
    return _quick_padding(state) and leaves_attention_out(backend, runner)


def _detach(model_runner: Any) -> None:
    """Leave every step to SGLang, those that SPLIT would divide and those that ranks vote on too."""
    speak_for(None)
    detach(model_runner)
    for runner in (model_runner.decode_cuda_graph_runner, model_runner.prefill_cuda_graph_runner):
        dispatch.detach(runner)
        leave_tails(runner)


def decode_backend(original: Any, cuda_graph_runner: Any) -> Any:
    """AROUND `resolve_decode_backend`: what SGLang would use, mirrored."""
    return _mirrored(original(cuda_graph_runner), cuda_graph_runner, DECODE)


def prefill_backend(original: Any, cuda_graph_runner: Any) -> Any:
    """AROUND `resolve_prefill_backend`, likewise."""
    return _mirrored(original(cuda_graph_runner), cuda_graph_runner, PREFILL)


def _mirrored(backend: Any, runner: Any, phase: str) -> Any:
    state = state_of(runner.model_runner)
    if state is None:
        return backend
    _let_go(state, runner.model_runner, phase)
    state.held[phase] = {"backend": backend}
    counted = _captured_again(state, runner, phase)
    width = getattr(runner, "captured_req_width", 1) if phase == DECODE else 1
    device = getattr(runner, "device_module", None)
    try:
        one_warm_up = state.config.quick_capture and needs_one_warm_up(backend, runner)
        cleared = phase == PREFILL and clears_in_graphs(state, backend, runner)
    # Whatever isn't as it is known to be, SGLang's own procedure is safe.
    except Exception as error:  # noqa: BLE001
        one_warm_up = cleared = False
        state.failures.note("looking at how graphs are captured", error, then="SGLang's own procedure captures them")
    sizes = tuple(getattr(runner, "capture_num_tokens", None) or ())
    clearing = {"clearing": partial(clear_in_graphs, sizes=sizes, failures=state.failures)} if cleared else {}
    by_replay = partial(state.count_by_replay, phase) if counted and width == 1 else None
    took = partial(state.savings.warm_up_s.__setitem__, phase)
    return mirror(
        backend, state.registry, phase, device=device, width=width, failures=state.failures, serving=state.serving,
        by_replay=by_replay, one_warm_up=one_warm_up, took=took, **clearing,
    )  # fmt: skip


def _let_go(state: State, model_runner: Any, phase: str) -> None:
    """Let go of graphs that SGLang has dropped to capture new ones, which need their memory.

    Attributes that call kpolicy with the object that they are of keep it until Python collects cycles.
    """
    held = state.held.pop(phase, {})
    runner = held.get("runner")
    if runner is not None and runner is getattr(model_runner, f"{phase}_cuda_graph_runner", None):
        return
    leave(held.get("backend"))
    dispatch.detach(runner)
    leave_tails(runner)


def _captured_again(state: State, runner: Any, name: str) -> bool:
    """A runner made anew while SGLang serves, after a change of weights, has the phase of the one before.

    Returns:
        Whether a phase counts its steps, now or once all is captured.
    """
    phase = state.phases.get(name)
    if phase is None:
        return True
    sizes = getattr(runner, "capture_bs" if name == DECODE else "capture_num_tokens", None) or ()
    if tuple(sizes) == phase.sizes:
        _attach(state, runner, phase)
        return True
    state.say(
        f"SGLang captures {name} graphs of other sizes than before; its own rule decides {name} steps from now on. "
        "Start it again to have kpolicy decide them"
    )
    return False


def capture_prefill_graph(original: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `capture_prefill_graph` of 0.5.23, which returns its eager runner bare where no size fits.

    Its callers want the runner and what it took, and would end SGLang.
    """
    captured = original(*args, **kwargs)
    if captured is not None and not hasattr(captured, "memory_phase"):
        from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import GraphCapture

        logger.warning("kpolicy: no prefill size fits this deployment's context and requests; prefill runs eagerly")
        draft = getattr(kwargs.get("model_runner"), "is_draft_worker", False)
        memory_phase = "draft_prefill" if draft else "prefill"
        return GraphCapture(runner=captured, memory_phase=memory_phase, memory_usage_gb=0, capture_time=0)
    return captured


# The scheduler


def new_batch_prefill(original: Any, scheduler: Any, running_batch: Any) -> Any:
    """AROUND `Scheduler.get_new_batch_prefill`: whether decodes run beside the prompts or in a step of their own."""
    try:
        step = scheduler._kpolicy_step
    except AttributeError:
        step = scheduler._kpolicy_step = _step(scheduler)
    return original(scheduler, running_batch) if step is None else step(original, running_batch)


def _step(scheduler: Any) -> Callable[[Any, Any], Any] | None:
    """What each step of this scheduler goes through, found once; None without kpolicy."""
    state = state_of(scheduler.tp_worker.model_runner)
    if state is None:
        return None
    step: Callable[[Any, Any], Any] = partial(counted, state, scheduler)
    split = None
    try:
        split = split_of(scheduler)
        step = step if split is None else split.step
    # Whatever of kpolicy raises, SGLang goes on scheduling.
    except Exception as error:  # noqa: BLE001
        state.failures.note("setting up SPLIT", error, then="SGLang goes on")
    own = wrapped_by(scheduler, _NEW_BATCH, new_batch_prefill)
    if own is not None:
        bind(scheduler, _NEW_BATCH, partial(step, own) if split is None else split.asked(own))
    return step


# What can't be had


def refusal(server_args: Any) -> str:
    """Why kpolicy leaves this deployment to SGLang; empty where it doesn't."""
    args = resolved(server_args)

    def has(name: str) -> Any:
        return getattr(args, name, None)

    found: Mapping[str, Any] = {
        "--disable-cuda-graph leaves no graphs to decide on; take it away, or unset KPOLICY_SGLANG": (
            has("disable_cuda_graph")
        ),
        "pipeline parallelism isn't supported; SGLang's own rules stay": (has("pp_size") or 1) > 1,
        "two-batch overlap isn't supported; SGLang's own rules stay": has("enable_two_batch_overlap"),
        "PD multiplexing isn't supported; SGLang's own rules stay": has("enable_pdmux"),
        # 0.5.23 sizes such a prefill by its own questions, with the limit on padding inside.
        "context parallelism isn't supported; SGLang's own rules stay": (
            (has("attn_cp_size") or 1) > 1 or (has("dcp_size") or 1) > 1 or has("enable_prefill_cp")
        ),
    }  # fmt: skip
    return next((text for text, applies in found.items() if applies), "")


def fail(message: str, *, once: bool = False) -> None:
    """Say that kpolicy can't be what was asked for; in strict mode end the process.

    Args:
        message: what can't be had, and what SGLang does instead.
        once: don't say it again where it was said so of these settings.

    Raises:
        SystemExit: in strict mode. SGLang's plugin loader logs any other error and goes on.
    """
    config = configured()
    if config is not None and config.strict:
        raise SystemExit(f"kpolicy: {message}")
    if once and message in _now["said"]:
        return
    _now["said"].add(message)
    logger.error("kpolicy: %s", message)
