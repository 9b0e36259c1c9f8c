"""What a replay of the CPU recorder costs beside the eager run of the same model, in one process and one run.

Run from the repository root, with torch and transformers::

    OMP_NUM_THREADS=1 python -m benchmarks.recorder

The model is a Llama of transformers with random weights. A step has one token for each of N requests, each attending
to a static, full window of keys and values that the step writes its own into (one slot a request, no paging), so
that attention costs what a decode's does. Repeats of eager and replay alternate. The ratio is of medians; the
interval holds 95% of medians of resampled repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

from kpolicy.executors.cpu import CpuAdapter

SIZES = (1, 2, 4, 8, 16, 32, 64)


def make_model(layers: int) -> Any:
    """A Llama of a few million parameters, attending through `_attend`."""
    transformers.AttentionInterface.register("kpolicy_static_window", _attend)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=704, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=4096, use_cache=False, attn_implementation="kpolicy_static_window",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def _attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **rest: Any) -> tuple[Any, None]:  # noqa: ARG001
    """One token a request over its own window: [N, heads, 1, head_dim]."""
    window, slots = rest["window"][module.layer_idx], rest["slots"]
    rows = torch.arange(len(query))
    keys, values = window
    keys.index_put_((rows, slots), key[:, :, 0])
    values.index_put_((rows, slots), value[:, :, 0])
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, keys.transpose(1, 2), values.transpose(1, 2), enable_gqa=True, scale=rest["scaling"]
    )
    return attended.transpose(1, 2), None


def make_step(model: Any, size: int, context: int) -> tuple[Callable[[], Any], Callable[[], None]]:
    """(a decode step of `size` requests, a change of its inputs)."""
    config = model.config
    shape = (size, context, config.num_key_value_heads, config.head_dim)
    window = [(torch.randn(shape), torch.randn(shape)) for _ in range(config.num_hidden_layers)]
    ids = torch.zeros(size, 1, dtype=torch.int64)
    positions, slots = torch.zeros_like(ids), torch.zeros(size, dtype=torch.int64)
    mask = torch.zeros(size, 1, 1, 1)

    def step() -> Any:
        return model(
            input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False, window=window, slots=slots
        ).logits

    def change() -> None:
        ids.random_(config.vocab_size)
        positions.random_(context)
        slots.copy_(positions[:, 0])

    return step, change


def measure(model: Any, size: int, context: int, repeats: int) -> dict[str, Any]:
    """Eager and replayed milliseconds of one size, and whether they agreed to the bit."""
    step, change = make_step(model, size, context)
    adapter = CpuAdapter()
    change()
    for _ in range(3):
        step()
    began = time.perf_counter()
    adapter.begin(adapter.new_pool())
    outputs = step()
    graph = adapter.end()
    capture_seconds = time.perf_counter() - began
    equal, times = True, ([], [])
    for _ in range(repeats):
        change()
        start = time.perf_counter()
        expected = step()
        middle = time.perf_counter()
        adapter.replay(graph)
        end = time.perf_counter()
        equal = equal and torch.equal(expected, outputs)
        times[0].append(middle - start)
        times[1].append(end - middle)
    low, high = _interval(*times)
    return {
        "tokens": size, "eager_ms": statistics.median(times[0]) * 1e3, "replay_ms": statistics.median(times[1]) * 1e3,
        "ratio": statistics.median(times[1]) / statistics.median(times[0]), "low": low, "high": high,
        "equal": equal, "operators": graph.num_operators, "bytes": graph.num_bytes, "capture_seconds": capture_seconds,
    }  # fmt: skip


def _interval(eager: Sequence[float], replay: Sequence[float], draws: int = 400) -> tuple[float, float]:
    """95% of the ratios of medians of resampled repeats."""
    chance, pairs = random.Random(0), list(zip(eager, replay, strict=True))
    ratios = []
    for _ in range(draws):
        drawn = chance.choices(pairs, k=len(pairs))
        ratios.append(statistics.median(r for _, r in drawn) / statistics.median(e for e, _ in drawn))
    ratios.sort()
    return ratios[int(0.025 * draws)], ratios[int(0.975 * draws)]


def main() -> int:
    """Print the table; 1 where a replay wasn't the eager run to the bit, or wasn't faster."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=64, help="keys that every request attends to")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--json", help="file to write the rows to")
    options = parser.parse_args()
    model = make_model(options.layers)
    parameters = sum(each.numel() for each in model.parameters())
    print(
        f"Llama, {options.layers} layers, {parameters / 1e6:.1f} M parameters, context {options.context}; torch "
        f"{torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads on "
        f"{os.cpu_count()} cores ({platform.machine()}), {options.repeats} repeats"
    )
    print("tokens  eager ms  replay ms  ratio  95% interval    calls  KiB     capture s  equal")
    rows = []
    with torch.inference_mode():
        for size in SIZES:
            row = measure(model, size, options.context, options.repeats)
            rows.append(row)
            print(
                f"{size:6d}  {row['eager_ms']:8.2f}  {row['replay_ms']:9.2f}  {row['ratio']:.3f}  "
                f"{row['low']:.3f} to {row['high']:.3f}  {row['operators']:5d}  {row['bytes'] / 1024:6.0f}  "
                f"{row['capture_seconds']:9.3f}  {row['equal']}"
            )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"parameters": parameters, "torch": str(torch.__version__), "rows": rows}, file, indent=1)
    return 0 if all(row["equal"] and row["high"] < 1 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
