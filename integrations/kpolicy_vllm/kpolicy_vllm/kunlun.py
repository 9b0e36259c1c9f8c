"""`KunlunGraphWrapper`: the graph wrapper that vLLM-Kunlun's design page describes and its code never had.

vLLM-Kunlun returns vLLM's own wrapper from `get_static_graph_wrapper_cls`, which vLLM asks for the pieces of a
PIECEWISE graph; the FULL one it takes by its own name. Both are made this one: by `register` where kpolicy is on by the
environment, in any vLLM, and by `kunlun_attach` in those that kpolicy knows. It captures and replays as vLLM's, and
differs in three things:

- A capture that fails costs its graph: that size runs eagerly from then on, and serving goes on.
- FULL graphs of attention that takes lengths on the host are on probation: replays run beside an eager run, whose
  output is what the caller gets. After three that have its bits, over rows shorter and longer than captured, in other
  blocks and of another number, the graph is trusted; one that hasn't is given up for good. A replay over the capture's
  own lengths proves nothing and runs eagerly. `kunlun_attach` shows each graph such rows at warm-up; what it couldn't
  show, steps of serving may.
- Linear attention keeps a state, which running twice would advance twice: its FULL graphs are refused.

Tensor-parallel ranks compare together: all trust a graph, or none does. Data-parallel ones serve other rows each, and
one that ran a step twice would leave the others in a collective, so there nothing is tried and such graphs are refused.

Unverified on hardware: held to a pretended vLLM, and to the signatures of vLLM-Kunlun 0.11.1 and of the vLLMs that it
is made for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar
from weakref import WeakSet

from kpolicy_vllm.config import Config
from kpolicy_vllm.kunlun_probation import PATIENCE, Probation, Seen, copied, each_of, num_tokens, same
from kpolicy_vllm.state import LOGGER

__all__ = ["LOGGER", "is_kunlun", "register", "tell_platform", "use_wrapper", "wrapper_class"]

_PLATFORM = "vllm_kunlun.platforms.kunlun"
_QUALNAME = "kpolicy_vllm.kunlun.KunlunGraphWrapper"
_WORKERS = ("vllm.v1.worker.worker_base", "vllm.worker.worker_base")
"""Where vLLM keeps `WorkerWrapperBase`, newest first"""
_STATEFUL = ("GDN", "Mamba", "Linear", "ShortConv")
_MARK = "_kpolicy"
_MARK_WORKER = "_kpolicy_kunlun"


def is_kunlun() -> bool:
    """Whether vLLM runs on vLLM-Kunlun's platform here."""
    if find_spec("vllm_kunlun") is None:
        return False
    platform = import_module("vllm.platforms").current_platform
    return type(platform).__module__.partition(".")[0] == "vllm_kunlun"


def register() -> bool:
    """Let vLLM-Kunlun use this wrapper, where both are there and kpolicy is on by the environment; whether it does."""
    if find_spec("vllm_kunlun") is None or Config.load({}) is None:
        return False
    tell_platform()
    for name in _WORKERS:
        try:
            _hook(import_module(name).WorkerWrapperBase)
            break
        except (ImportError, AttributeError):
            continue
    return True


def tell_platform() -> None:
    """Have vLLM-Kunlun's platform name our wrapper, which vLLM asks it for when it compiles."""
    platform = import_module(_PLATFORM).KunlunPlatform
    original = platform.get_static_graph_wrapper_cls
    if not getattr(original, _MARK, False):

        def get_static_graph_wrapper_cls(cls: type[Any]) -> str:  # noqa: ARG001 - as the platform's
            return _QUALNAME

        setattr(get_static_graph_wrapper_cls, _MARK, True)
        platform.get_static_graph_wrapper_cls = classmethod(get_static_graph_wrapper_cls)


def _hook(worker_wrapper: type[Any]) -> None:
    """When a worker has made its runner, have that use our wrapper for FULL graphs."""
    original = worker_wrapper.init_device
    if getattr(original, _MARK_WORKER, False):
        return

    @functools.wraps(original)
    def init_device(self: Any, *args: Any, **named: Any) -> Any:
        result = original(self, *args, **named)
        runner = getattr(getattr(self, "worker", None), "model_runner", None)
        try:
            if runner is not None:
                use_wrapper(runner)
        except Exception as error:  # noqa: BLE001 - whatever it is, vLLM-Kunlun serves on with vLLM's own wrapper
            LOGGER.warning("kpolicy's wrapper of FULL graphs is off: %s: %s", type(error).__name__, error)
        return result

    setattr(init_device, _MARK_WORKER, True)
    worker_wrapper.init_device = init_device


def use_wrapper(runner: Any, stock: type[Any] | None = None, made: type[Any] | None = None) -> None:
    """Once the runner has loaded its model: our wrapper of FULL graphs in the place of vLLM's.

    Args:
        runner: a runner that hasn't loaded its model.
        stock: vLLM's `CUDAGraphWrapper`.
        made: what `wrapper_class` made.
    """
    load = runner.load_model

    def load_model(*args: Any, **named: Any) -> Any:
        result = load(*args, **named)
        theirs = stock or import_module("vllm.compilation.cuda_graph").CUDAGraphWrapper
        model = runner.model
        if type(model) is theirs:
            ours = made or __getattr__("KunlunGraphWrapper")
            runner.model = ours(
                model.runnable, model.vllm_config, runtime_mode=model.runtime_mode,
                cudagraph_options=model.cudagraph_options,
            )  # fmt: skip
            instances = getattr(theirs, "_all_instances", None)
            if instances is not None:
                instances.discard(model)
        return result

    runner.load_model = load_model


def __getattr__(name: str) -> Any:
    # vLLM resolves the wrapper by its name, in a worker; nothing of vLLM is imported before.
    if name != "KunlunGraphWrapper":
        raise AttributeError(f"module 'kpolicy_vllm.kunlun' has no attribute {name!r}")
    from kpolicy.executors.cuda.failures import classify

    context = import_module("vllm.forward_context")
    made = globals().get(name) or wrapper_class(
        import_module("vllm.compilation.cuda_graph").CUDAGraphWrapper,
        context.get_forward_context,
        import_module("vllm.config").CUDAGraphMode,
        lambda error: classify(error).sticky,
    )
    globals()[name] = made
    return made


def _agree(ok: bool) -> bool:
    """Whether it holds on every tensor-parallel rank; each must ask."""
    from kpolicy_vllm.versions.names import agreed_on

    return agreed_on(ok, import_module("vllm.distributed.parallel_state").get_tp_group())


def wrapper_class(
    base: type[Any], forward_context: Callable[[], Any], modes: Any, is_lost: Callable[[BaseException], bool],
    agree: Callable[[bool], bool] = _agree,
) -> type[Any]:  # fmt: skip
    """See the module's docstring.

    Args:
        base: vLLM's `CUDAGraphWrapper`.
        forward_context: gives the step's forward context.
        modes: vLLM's `CUDAGraphMode`.
        is_lost: whether an error means that the device is lost.
        agree: whether something holds on every tensor-parallel rank.
    """

    class KunlunGraphWrapper(base):  # type: ignore[misc]
        """See `wrapper_class`.

        Attributes:
            refused: why sizes run eagerly, by descriptor.
            probation: FULL graphs that aren't trusted yet.
            on_refused: is told of each FULL graph that is given up.
            made: every wrapper there is, of pieces and of whole models.
        """

        made: ClassVar[WeakSet[Any]] = WeakSet()

        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            self.refused: dict[Any, str] = {}
            self._retired: list[Any] = []
            self.probation: dict[Any, Probation] = {}
            self.on_refused: Callable[[Any, str], None] = lambda _desc, _why: None
            parallel = getattr(self.vllm_config, "parallel_config", None)
            self._agree = agree if getattr(parallel, "tensor_parallel_size", 1) > 1 else bool
            self._apart = getattr(parallel, "data_parallel_size", 1) > 1
            self.made.add(self)

        def __call__(self, *args: Any, **named: Any) -> Any:
            context = forward_context()
            mode, desc = context.cudagraph_runtime_mode, context.batch_descriptor
            if mode == modes.NONE or mode != self.runtime_mode or desc in self.refused:
                return self.runnable(*args, **named)
            entry = self.concrete_cudagraph_entries.get(desc)
            if entry is None or entry.cudagraph is None:
                return self._captured(desc, context.attn_metadata, args, named)
            trial = self.probation.get(desc)
            if trial is None:
                return super().__call__(*args, **named)
            return self._tried(desc, trial, context.attn_metadata, args, named)

        def _captured(self, desc: Any, metadata: Any, args: Any, named: Any) -> Any:
            whole = self.runtime_mode == modes.FULL
            if whole and any(name in type(each).__name__ for each in each_of(metadata) for name in _STATEFUL):
                self._refuse(desc, "its attention keeps a state, which can't be run twice to prove a replay")
                return self.runnable(*args, **named)
            why = ""
            try:
                output = super().__call__(*args, **named)
            except RuntimeError as error:
                if is_lost(error):
                    raise
                why = f"its capture failed: {(str(error).splitlines() or ['?'])[0]}"
            # Only whole graphs are run twice for a proof, so only there must ranks be of one mind.
            if whole and not self._agree(not why):
                why = why or "its capture failed on another rank"
            if why:
                self._refuse(desc, why)
                return self.runnable(*args, **named)
            seen = Seen.of(metadata) if whole else None
            if seen is not None and self._apart:
                self._refuse(desc, "its attention takes lengths on the host, and data-parallel ranks can't try graphs")
                return self.runnable(*args, **named)
            if seen is not None:
                tokens = desc.num_tokens // max(1, getattr(desc, "num_reqs", None) or desc.num_tokens)
                self.probation[desc] = Probation(seen, max(seen.lengths, default=0) <= max(1, tokens))
            return output

        def _tried(self, desc: Any, trial: Probation, metadata: Any, args: Any, named: Any) -> Any:
            seen = Seen.of(metadata)
            if seen is None or not trial.tells(seen):
                if trial.steps >= PATIENCE:
                    missing = ", ".join(sorted(trial.missing())) or "other lengths"
                    self._refuse(desc, f"{trial.steps} steps showed it no replay over {missing}")
                return self.runnable(*args, **named)
            count = num_tokens(metadata, seen, desc)
            replayed = copied(super().__call__(*args, **named), desc.num_tokens, count)
            wanted = self.runnable(*args, **named)
            if not self._agree(same(replayed, copied(wanted, desc.num_tokens, count))):
                self._refuse(desc, "a replay over other rows isn't what eager computes: lengths are frozen in it")
            elif trial.compared(seen):
                del self.probation[desc]
                LOGGER.info("kpolicy: the FULL graph of %s has proved itself", desc)
            return wanted

        def _refuse(self, desc: Any, why: str) -> None:
            self.refused[desc] = why
            self.probation.pop(desc, None)
            entry = self.concrete_cudagraph_entries.pop(desc, None)
            if entry is not None and entry.cudagraph is not None:
                # Destroying one graph of a shared pool can break the others.
                self._retired.append(entry)
            LOGGER.warning("kpolicy: %s runs eagerly from here on: %s", desc, why)
            if self.runtime_mode == modes.FULL:
                self.on_refused(desc, why)

    return KunlunGraphWrapper
