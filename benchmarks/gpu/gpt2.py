"""GPT-2 as in older write-ups of CUDA graphs in vLLM: a batch of 128 prompts of 6 tokens, eagerly and in graphs.

Ways are interleaved in rounds. Every graph's logits are held to eager ones at the same padded shape, bit for bit, and
to transformers' own forward by the largest difference and the tokens that are likeliest.

Run: ``python -m benchmarks.gpu.gpt2 --out FILE``
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

from benchmarks.command import made_file
from benchmarks.gpu.common import Results, header, host_noise, load_model, logits_of, opened, ran, steady, synchronise
from benchmarks.pairs import interval
from kpolicy.heap import frozen_heap

GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 50257, "n_positions": 1024,
    "n_embd": 768, "n_layer": 12, "n_head": 12, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
REQUESTS, TOKENS = 128, 6


def main(argv: list[str] | None = None) -> int:
    """Measure and write; 1 where outputs differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--date", default="unstated")
    parser.add_argument("--out", type=made_file, required=True)
    options = parser.parse_args(argv)
    options.model, options.layers = "gpt2", 0

    import torch

    config = GPT2 | ({"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 256} if options.tiny else {})
    model = load_model(config, options, kv_tokens=1 << 14, block_size=16, max_model_len=1024, max_num_reqs=REQUESTS)
    results = Results(options.out, header(options, "gpt2", argv))
    results.data["host_noise"] = host_noise()
    with torch.no_grad(), frozen_heap():
        results.put("prompts", measure(model, options, chunks=True))
        results.put("decodes", measure(model, options, chunks=False))
    for name, cell in results.cells.items():
        print(name, cell, flush=True)
    return 1 if any(way.get("differs") for cell in results.cells.values() for way in cell["ways"].values()) else 0


def measure(model: Any, options: argparse.Namespace, *, chunks: bool) -> dict[str, Any]:
    """128 prompts of 6 tokens, or 128 decodes after them: every way's time and outputs."""
    import torch

    from benchmarks.gpu.regret import inputs_of
    from kpolicy.ladders import CaptureSizes, plan_keys
    from kpolicy.settings import Settings
    from kpolicy.testing.executors import all_decisions
    from tests.executors_launcher.checker import eager_part

    tokens = REQUESTS * TOKENS
    executor, registry = opened(model)
    settings = Settings(max_num_reqs=REQUESTS, max_num_tokens=tokens)
    sizes = (tokens,) if chunks else (REQUESTS,)
    keys = plan_keys(CaptureSizes((REQUESTS,), sizes, sizes), model.support.claims, settings)
    registry.plan(keys)
    executor.capture(keys)
    shape: dict[str, Any] = (
        {"decodes": [], "chunks": [(TOKENS, 0)] * REQUESTS, "steps": 1}
        if chunks
        else {"decodes": [TOKENS] * REQUESTS, "chunks": [], "steps": 1}
    )
    inputs = inputs_of(shape, model)
    ways = {each.mode.value: each for each in all_decisions(inputs.numbers, registry.captured())}
    found: dict[str, dict[str, Any]] = {}
    plain = torch.cat(logits_of(ran(executor, ways["eager"], inputs)[1])).float()
    for name, decision in ways.items():
        mine = torch.cat(logits_of(ran(executor, decision, inputs)[1]))
        same = torch.cat([eager_part(executor, launch, inputs).outputs.tensor for launch in decision.launches])
        off = mine.float() - plain
        found[name] = {
            "differs": not torch.equal(mine, same), "largest_difference_from_eager": float(off.abs().max()),
            "likeliest_tokens_equal": int((mine.argmax(-1) == plain.argmax(-1)).sum()),
        }  # fmt: skip
    own = torch.tensor(inputs.token_ids, device=model.device).view(REQUESTS, -1)
    times: dict[str, list[float]] = {name: [] for name in (*ways, *(["transformers"] if chunks else []))}
    for _ in range(options.rounds + 3):
        for name in times:
            synchronise(options.device)
            times[name].append(_theirs(model, own, options) if name == "transformers" else ran(
                executor, ways[name], inputs)[0])  # fmt: skip
    times = {name: each[3:] for name, each in times.items()}
    for name in ways:
        ratio, low, high = interval([a / b for a, b in zip(times["eager"], times[name], strict=True)])
        found[name] |= {
            "us": steady(times[name]), "times_faster_than_eager": round(ratio, 3),
            "interval": [round(low, 3), round(high, 3)],
        }  # fmt: skip
    executor.release()
    cell: dict[str, Any] = {"requests": REQUESTS, "tokens": TOKENS if chunks else 1, "ways": found}
    if chunks:
        logits = model.reference_logits(inputs.token_ids[:TOKENS])[-1].float()
        cell["transformers"] = {
            "us": round(statistics.median(times["transformers"]), 1),
            "largest_difference_of_the_first_row": float((plain[0] - logits).abs().max()),
        }  # fmt: skip
    return cell


def _theirs(model: Any, ids: Any, options: argparse.Namespace) -> float:
    """Microseconds of transformers' own forward with its own attention."""
    from kpolicy.serving.marks import own_forward

    with own_forward(model.hf):
        begun = time.perf_counter()
        model.hf(input_ids=ids, use_cache=False, logits_to_keep=1)
        synchronise(options.device)
        return (time.perf_counter() - begun) * 1e6


if __name__ == "__main__":
    sys.exit(main())
