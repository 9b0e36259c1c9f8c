"""Batches as real traces make them, for benchmarks that time single steps: counts alone, no request is kept.

Each load of each model is replayed through the scheduler, with the model's analytic costs on the device as the clock,
and steps are drawn at random from all that ran, without repeats of a shape.

Run: ``python -m benchmarks.gpu.shapes --traces ../shared/traces --configs DIR --out FILE``, where DIR has a folder with
a config.json for each model.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.command import input_folder, output_file

LOADS: dict[str, tuple[str, float]] = {
    "conversation x1": ("azure_llm_2023_conv.csv", 1.0),
    "conversation x3": ("azure_llm_2023_conv.csv", 3.0),
    "code x1": ("azure_llm_2023_code.csv", 1.0),
    "code x6": ("azure_llm_2023_code.csv", 6.0),
    "mooncake x0.3": ("mooncake_conversation.csv.gz", 0.3),
    "burstgpt x600": ("burstgpt_1_first400.csv", 600.0),
}
MAX_NUM_REQS, MAX_NUM_TOKENS = 256, 2048
KV_TOKENS, BLOCK_SIZE, LONGEST = 262_144, 32, 16_384
REQUESTS = 1500
"""Of a trace, from its middle."""


class Shape(NamedTuple):
    """One step's rows."""

    decodes: list[int]
    """KV tokens of each decode row, this step's included"""
    chunks: list[tuple[int, int]]
    """(new tokens, context) of each prompt chunk"""
    steps: int
    """Decode steps that may follow each other"""


def replay(trace: Path, rate: float, config: dict[str, Any], count: int, seed: int) -> dict[str, Any]:
    """Shapes of one load.

    Args:
        trace: the trace's file.
        rate: factor on its arrivals.
        config: the model's config.json.
        count: shapes wanted.
        seed: draws them.
    """
    from kpolicy.engine import Engine
    from kpolicy.executors.simulated import SimulatedExecutor
    from kpolicy.figures import config_costs
    from kpolicy.scheduling.batching import Batcher
    from kpolicy.scheduling.traces import read_trace
    from kpolicy.settings import Settings
    from kpolicy.trace_run import Prompts, serve_trace

    whole = read_trace(trace)
    fitting = whole.limited(LONGEST)
    first = max(0, (len(fitting) - REQUESTS) // 2)
    chosen = fitting.requests[first : first + REQUESTS]
    window = fitting.window(chosen[0].arrival_s, chosen[-1].arrival_s - chosen[0].arrival_s + 1e-6)
    settings = Settings(max_num_reqs=MAX_NUM_REQS, max_num_tokens=MAX_NUM_TOKENS)
    costs = config_costs(config)
    executor = SimulatedExecutor(
        costs, num_blocks=KV_TOKENS // BLOCK_SIZE, block_size=BLOCK_SIZE, max_num_reqs=MAX_NUM_REQS
    )
    engine = Engine("auto", settings=settings, costs=costs, executor=executor)
    engine.capture()
    batcher = Batcher(settings, num_blocks=KV_TOKENS // BLOCK_SIZE, block_size=BLOCK_SIZE, steps_ahead=8)
    rng = random.Random(seed)
    seen: dict[tuple[Any, ...], Shape] = {}
    total = 0

    def note(_index: int, inputs: Any, _outputs: Any, _batcher: Any, _start: float) -> None:
        nonlocal total
        total += 1
        numbers = inputs.numbers
        decodes = list(inputs.kv_lens[: numbers.num_decodes])
        lens = list(zip(inputs.query_lens, inputs.kv_lens, strict=True))[numbers.num_decodes :]
        shape = Shape(decodes, [(new, kv - new) for new, kv in lens], numbers.max_decode_steps)
        key = (len(decodes), tuple(new for new, _ in shape.chunks), sum(decodes) // 2048)
        # One of each kind, drawn evenly from all steps of it.
        times = counts[key] = counts.get(key, 0) + 1
        if rng.random() < 1 / times:
            seen[key] = shape

    counts: dict[tuple[Any, ...], int] = {}
    serve_trace(window.scaled(rate) if rate != 1 else window, engine, batcher, Prompts(), on_step=note)
    # Steps are drawn as they come, so a kind that is common is likelier to be among them.
    kinds = sorted(seen)
    drawn: dict[tuple[Any, ...], Shape] = {}
    while len(drawn) < min(count, len(kinds)):
        key = rng.choices(kinds, weights=[counts[each] for each in kinds])[0]
        drawn[key] = seen[key]
    return {
        "steps": total,
        "kinds": len(kinds),
        "too_long": len(whole) - len(fitting),
        "shapes": [{**shape._asdict(), "times": counts[key]} for key, shape in drawn.items()],
    }


def main(argv: list[str] | None = None) -> int:
    """Replay every load of every model and write the shapes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=input_folder, required=True)
    parser.add_argument("--configs", type=input_folder, required=True)
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--count", type=int, default=44)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=output_file, required=True)
    options = parser.parse_args(argv)
    found: dict[str, dict[str, Any]] = {}
    for folder in sorted(options.configs.iterdir()):
        if options.models and folder.name not in options.models:
            continue
        config = json.loads((folder / "config.json").read_text())
        found[folder.name] = {}
        for load, (file, rate) in LOADS.items():
            at = replay(options.traces / file, rate, config, options.count, options.seed)
            found[folder.name][load] = at
            mixed = sum(bool(each["decodes"] and each["chunks"]) for each in at["shapes"])
            print(
                folder.name, load, f"{at['steps']} steps, {at['kinds']} kinds, {len(at['shapes'])} drawn, {mixed} mixed"
            )
            options.out.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
