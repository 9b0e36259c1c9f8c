"""Serves a few requests through SGLang's real scheduler on a CPU; prints the tokens of each. Run by a test.

    python -m tests.integrations.sglang.serve FOLDER stock|split|mixed|gap|turns|stock-long|long

FOLDER gets a small generated checkpoint. Costs are made up, so that every cycle is split, or none is. With ``long``
there are long prompts among short ones, and what they take makes kpolicy run them apart.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from benchmarks.sglang import check
from benchmarks.sglang.server import Trace

REQUESTS = 16
ARGUMENTS = {
    "load_format": "auto", "device": "cpu", "attention_backend": "torch_native", "dtype": "float32",
    "max_total_tokens": 20_000, "max_running_requests": 16, "chunked_prefill_size": 64, "context_length": 1024,
    "enable_mixed_chunk": True,
}  # fmt: skip


def checkpoint(folder: Path) -> None:
    """The checkpoint of the benchmark's check, written once."""
    import torch

    if not (folder / "model.safetensors").is_file():
        maker = check.Check.__new__(check.Check)
        maker.torch, maker.device = torch, "cpu"
        small = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 8, "intermediate_size": 256}
        maker._make({**check.CONFIGS["qwen"], **small}, folder)


LONG = {"max_total_tokens": 60_000, "chunked_prefill_size": 4096, "context_length": 4096, "enable_mixed_chunk": False}


def costs(trace: Any, mixed_us: float, gap_ms: float | None, *, long: bool = False) -> None:
    """Have every cycle be split or mixed, or long prompts run apart, whatever it would really take."""
    from kpolicy.costs import Curve
    from kpolicy.settings import Objective
    from kpolicy_sglang.config import Config
    from kpolicy_sglang.phase import DECODE, PREFILL, MixedCost, Phase, table_of
    from kpolicy_sglang.state import State, attach

    state = State(Config(gap_ms=gap_ms), "0.5.16")
    most = LONG["chunked_prefill_size"] if long else 64
    for name in (DECODE, PREFILL):
        phase = state.phases[name] = Phase(name, (16, 64), most, full=name == DECODE)
        phase.install("auto", table_of("made up", {16: 100, 64: 100}, {1: 200}), Objective())
    curve = Curve((1,), (mixed_us,))
    state.mixed = MixedCost(curve, curve, 2, 8)
    if long:
        state.long, state.beside = Curve((2048, 4096), (5_000.0, 9_000.0)), 1.0
    attach(trace.runner, state)


def main() -> None:
    """See the module's docstring."""
    folder, how = Path(sys.argv[1]), sys.argv[2]
    checkpoint(folder)
    import sglang.srt.managers.scheduler  # noqa: F401  what a plugin finds in SGLang's own process
    import torch
    from sglang.srt.plugins import load_plugins

    load_plugins()
    # Mixed batches need no turns.
    long = how.endswith("long")
    more = LONG if long else {"enable_mixed_chunk": False} if how == "turns" else {}
    trace = Trace({"model_path": str(folder), **ARGUMENTS, **more})
    if not how.startswith("stock"):
        costs(trace, 1e9 if how == "split" else 1.0, 0.05 if how == "gap" else None, long=long)
    tokens: dict[str, list[int]] = {}
    sender = trace.scheduler.ipc_channels.send_to_detokenizer
    send = sender.send_output

    def keep(output: Any, _: Any = None) -> None:
        for name, ids in zip(output.rids, output.output_ids, strict=True):
            tokens.setdefault(name, []).extend(ids)
        send(output)

    sender.send_output = keep
    rng = random.Random(1)  # noqa: S311  not for secrets
    lengths = [40, 300, 700, 2500] if long else [10, 50, 150, 300]
    requests = [[0.01 * i, rng.choice(lengths), rng.randint(3, 20)] for i in range(REQUESTS)]
    batches = _watched(trace)
    with torch.no_grad():
        served = trace.run(requests, 10)
    past_registry = "get_new_batch_prefill" in vars(trace.scheduler)
    said = {
        "tokens": tokens, "cycles": served["cycles"], "done": served["done"], "batches": batches,
        "past_registry": past_registry,
    }  # fmt: skip
    print("SERVED " + json.dumps(said), flush=True)  # noqa: T201


def _watched(trace: Any) -> list[list[int]]:
    """The tokens of each prompt of a step, as steps run."""
    run, seen = trace.scheduler.run_batch, []

    def run_batch(batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not batch.forward_mode.is_decode():
            seen.append(list(batch.extend_lens))
        return run(batch, *args, **kwargs)

    trace.scheduler.run_batch = run_batch
    return seen


if __name__ == "__main__":
    main()
