"""Attention kernels beside each other: Triton's, torch's FlashAttention, FlashInfer's, on the prompts of mixed steps.

A call is of a step's `LAYERS` layers, as a model makes them: what kernels work out once a step is done once. Kernels
take turns round by round. `device_us` is a layer's time behind work that keeps the device busy, `step_us` from the
first call to the end, the host's time included. Ratios are to `triton`, above 1 where the kernel takes longer.

Every kernel's result is held to Triton's first.

Run: ``python -m benchmarks.gpu.attention --out FILE [--kernels flash flashinfer]``
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

from benchmarks.command import made_file
from benchmarks.gpu.common import Results, header, steady, synchronise
from benchmarks.pairs import interval

LAYERS = 24
HEADS = {"0.5B": (14, 2, 64), "1B": (32, 8, 64), "8B": (32, 8, 128)}
BATCHES: dict[str, tuple[list[int], list[tuple[int, int]]]] = {
    # KV of decode rows; (new tokens, KV tokens) of prompts.
    "512": ([], [(512, 512)]),
    "2048": ([], [(2048, 2048)]),
    "512 of 4096": ([], [(512, 4096)]),
    "4 x 500": ([], [(500, 500)] * 4),
    "32 decodes + 512": ([512] * 32, [(512, 512)]),
}
PAGE = 32


def step_of(batch: tuple[list[int], list[tuple[int, int]]], device: Any) -> tuple[Any, Any, int, int]:
    """(makes a step, its rows, pages, tokens); pages follow each other in no order."""
    import torch

    from kpolicy.executors.step_model import RowLayout, StepContext, StepTensors
    from kpolicy.serving.rows import RowTensors

    decodes, prompts = batch
    query_lens = [1] * len(decodes) + [new for new, _ in prompts]
    kv_lens = decodes + [kv for _, kv in prompts]
    needed = [-(-kv // PAGE) for kv in kv_lens]
    pages = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0)).tolist()
    table = torch.zeros(len(kv_lens), max(needed), dtype=torch.int32)
    for row, count in enumerate(needed):
        table[row, :count] = torch.tensor([pages.pop() for _ in range(count)])
    whole: dict[str, Any] = {"dtype": torch.int32, "device": device}
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    rows = RowTensors(table.to(device), torch.tensor(kv_lens, **whole), starts, PAGE)
    layout = RowLayout(sum(query_lens), len(decodes), query_lens, kv_lens)
    none: Any = None

    def made() -> Any:
        return StepContext(StepTensors(none, none, none, *rows[:3]), layout, None)

    return made, rows, sum(needed), sum(query_lens)


def measure(chosen: dict[str, Any], heads: tuple[int, int, int], batch: Any, rounds: int, device: Any) -> Any:
    """One cell: every kernel's times, and ratios to the first one's."""
    import torch

    from kpolicy.serving.kv_cache import LayerSpec

    num_heads, num_kv_heads, dim = heads
    made, rows, pages, num_tokens = step_of(batch, device)
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    caches = [torch.randn(pages * PAGE + 1, num_kv_heads, dim, device=device).to(dtype) for _ in "kv"]
    query = torch.randn(num_tokens, num_heads, dim, device=device).to(dtype)
    spec = LayerSpec(num_heads, num_kv_heads, dim, dim, dim**-0.5)
    for kernels in chosen.values():
        getattr(kernels, "try_pages", lambda *_: None)(spec, dtype, PAGE)

    def layers(name: str) -> Any:
        step = made()
        for _ in range(LAYERS):
            out = chosen[name].attend(step, spec, query, rows, *caches)
        return out

    first = next(iter(chosen))
    right = layers(first).float()
    off = {name: float((layers(name).float() - right).norm() / right.norm()) for name in chosen}
    wall: dict[str, list[float]] = {name: [] for name in chosen}
    busy: dict[str, list[float]] = {name: [] for name in chosen}
    for i in range(rounds + 2):
        for name in sorted(chosen, reverse=bool(i % 2)):
            synchronise(device.type)
            start = time.perf_counter()
            layers(name)
            synchronise(device.type)
            passed = (time.perf_counter() - start) * 1e6
            us = passed
            if cuda:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(30_000_000)
                begin.record()
                layers(name)
                end.record()
                end.synchronize()
                us = begin.elapsed_time(end) * 1e3
            if i > 1:
                wall[name].append(passed)
                busy[name].append(us / LAYERS)
    found = {}
    for name in chosen:
        ratio = interval([a / b for a, b in zip(busy[name], busy[first], strict=True)])
        found[name] = {
            "device_us": steady(busy[name]), "step_us": steady(wall[name]), "relative_difference": round(off[name], 5),
            "device_ratio": round(ratio[0], 3), "interval": [round(each, 3) for each in ratio[1:]],
            "step_ratio": round(statistics.median(a / b for a, b in zip(wall[name], wall[first], strict=True)), 3),
        }  # fmt: skip
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure the cells that the file doesn't have; 1 where a kernel computes something else."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kernels", nargs="*", default=["flash", "flashinfer"], help="beside triton")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="short prompts, plain kernels: a dry run")
    parser.add_argument("--date", default="unstated")
    parser.add_argument("--seconds", type=float, default=300.0, help="begin nothing new after so many")
    parser.add_argument("--out", type=made_file, required=True)
    options = parser.parse_args(argv)
    options.model, options.layers = "attention", 0

    import torch

    from kpolicy.serving.kernels import choose_kernels, kernels_here

    device = torch.device(options.device)
    here = kernels_here(device)
    names = ["plain"] if options.tiny else ["triton", *options.kernels]
    results = Results(options.out, header(options, "attention", argv))
    results.data["not_here"] = {name: here[name] for name in names if here[name]}
    chosen = {name: choose_kernels(device, name) for name in names if not here[name]}
    batches = {"9": ([], [(9, 20)])} if options.tiny else BATCHES
    with torch.no_grad():
        for model, heads in HEADS.items():
            for name, batch in batches.items():
                cell = f"{model}/{name}"
                if cell not in results.cells and results.elapsed() < options.seconds:
                    results.put(cell, measure(chosen, heads, batch, options.rounds, device))
                    print(cell, results.cells[cell], f"{results.elapsed():.0f} s", flush=True)
    results.data["flash_gathers"] = {
        str(kind): why for kernels in chosen.values() for kind, why in getattr(kernels, "no_pages", {}).items()
    }  # fmt: skip
    results.write()
    differ = {
        cell for cell, each in results.cells.items() for one in each.values() if one["relative_difference"] > 0.02
    }
    print(f"{len(results.cells)} cells, {sorted(differ) or 'none'} differ, not here: {results.data['not_here']}")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
