"""What a step's time is made of: kernels by family, and what its launches take the host, eagerly and in graphs.

A prompt of 2,048 tokens, alone and beside decodes, and decodes alone, in EAGER and each graph mode that holds them.
Each way's wall time and host time are medians of steps without a profiler. Then a few steps run under torch's profiler,
whose kernels' times are summed by name and by family (`FAMILIES`); what no family's pattern fits is ``other``.

`device_us` is that sum, without the gaps between kernels, which a graph has too; `host_us` is until the launching call
returns, and where the device is behind it may wait there. What the host takes beyond the device is what a graph saves.

Run: ``python -m benchmarks.gpu.kernels --config FILE --out FILE``; a run goes on where its file ends. With
``--their-experts``, in a file of its own, a mixture of experts runs on transformers' own kernels for it.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from typing import Any

from benchmarks.gpu.common import (
    Results,
    add_options,
    config_of,
    header,
    host_noise,
    load_model,
    opened,
    ran,
    steady,
    synchronise,
)
from kpolicy.heap import frozen_heap

FAMILIES = {
    # `kpolicy.serving.gpu`'s own are among these and attention's; Triton names them as their functions.
    "experts": r"group(ed)?_?(gemm|mm)|GroupProblemShape|moe|^_(route_copies|silu_times|weighted_sum)$",
    "attention": r"^_(decode|(expanded_)?prefill|attend|combine|share_out|write)$|flash_(fwd|bwd)|fmha|attention|"
    r"Batch(Prefill|Decode)",
    "matrix products": r"gemm|gemv|dot_kernel|nvjet|cutlass|matmul|splitK|aten::(mm|bmm|addmm|linear)",
    "sorting and gathering": r"sort|scatter|gather|index_|_index|bincount|histogram|cumsum|scan|topk|searchsorted",
    "copies": r"memcpy|memset|copy|CatArray|aten::cat",
    "elementwise and reductions": r"elementwise|reduce|vectorized|norm|softmax|aten::(mul|add|silu|pow|mean|sum|rsqrt)",
}
"""Patterns of kernel names; the first that fits counts. Clearing rows (`masked_fill`) and fills are elementwise."""
ROUNDS, PROFILED = 12, 4


def family_of(name: str) -> str:
    """The family that a kernel is counted with, by its name."""
    return next((each for each, pattern in FAMILIES.items() if re.search(pattern, name, re.I)), "other")


def shapes(tiny: bool) -> dict[str, dict[str, Any]]:
    """The steps looked at, as `benchmarks.gpu.regret.inputs_of` takes them."""
    new, kv, few, many = (24, 16, 1, 4) if tiny else (2048, 1000, 8, 32)
    return {
        f"prompt of {new}": {"decodes": [], "chunks": [(new, 0)], "steps": 1},
        f"prompt of {new - few} and {few} decodes": {"decodes": [kv] * few, "chunks": [(new - few, 0)], "steps": 1},
        "1 decode": {"decodes": [kv], "chunks": [], "steps": 1},
        f"{many} decodes": {"decodes": [kv] * many, "chunks": [], "steps": 1},
    }


def kernels_of(step: Any, device: str, count: int) -> tuple[Counter[str], Counter[str]]:
    """(microseconds a step, launches of all steps) by the name of a kernel; on a CPU by operator."""
    from torch.profiler import ProfilerActivity, profile

    cuda = device.startswith("cuda")
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as found:
        for _ in range(count):
            step()
        synchronise(device)
    us: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for each in found.key_averages():
        took = each.self_device_time_total if cuda else each.self_cpu_time_total
        if took:
            us[each.key] += took / count
            launches[each.key] += each.count
    return us, launches


def measure(executor: Any, decision: Any, inputs: Any, device: str) -> dict[str, Any]:
    """One way of a step: its times, and its kernels."""
    walls, hosts = [], []
    for _ in range(3 + ROUNDS):
        synchronise(device)
        start = time.perf_counter()
        outputs = executor.run(decision, inputs)
        hosts.append((time.perf_counter() - start) * 1e6)
        for event in outputs.ready:
            event.wait()
        walls.append((time.perf_counter() - start) * 1e6)
    us, launches = kernels_of(lambda: ran(executor, decision, inputs), device, PROFILED)
    families: Counter[str] = Counter()
    for name, took in us.items():
        families[family_of(name)] += took
    longest = [(name[:160], took, launches[name]) for name, took in us.most_common(30)]
    return {
        "wall_us": steady(walls[3:]), "host_us": steady(hosts[3:]), "device_us": round(sum(us.values()), 1),
        "kernels": round(sum(launches.values()) / PROFILED),
        "families": {name: round(took, 1) for name, took in families.most_common()},
        "longest": [[name, round(took, 1), round(count / PROFILED)] for name, took, count in longest],
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, seconds=90.0)
    parser.add_argument("--their-experts", action="store_true", help="a mixture of experts on transformers' own")
    options = parser.parse_args(argv)

    import torch

    from benchmarks.gpu.regret import inputs_of
    from kpolicy.ladders import CaptureSizes, plan_keys
    from kpolicy.serving.experts import THEIRS
    from kpolicy.settings import Settings
    from kpolicy.testing.executors import all_decisions

    config, tiny = config_of(options), options.tiny
    results = Results(options.out, header(options, "kernels", argv))
    settings = Settings(max_num_reqs=8 if tiny else 256, max_num_tokens=64 if tiny else 2048)
    model = load_model(config, options, kv_tokens=1 << 12 if tiny else 1 << 17, max_model_len=4096,
                       max_num_reqs=settings.max_num_reqs)  # fmt: skip
    if options.their_experts:
        model.hf.set_experts_implementation(THEIRS)
    experts = model.model_shape.get("expert_kernels")
    if results.cells and results.data.get("expert_kernels") != experts:
        sys.exit(
            f"{options.out} is of experts on {results.data.get('expert_kernels')!r}, not {experts!r}; give another"
        )
    results.data["expert_kernels"] = experts
    results.data["host_noise"] = host_noise(0.1 if tiny else 2.0)
    with torch.no_grad(), frozen_heap():
        executor, registry = opened(model)
        keys = plan_keys(
            CaptureSizes((1, 4) if tiny else (1, 32), *(((24,) if tiny else (2048,)),) * 2),
            model.support.claims,
            settings,
        )
        registry.plan(keys)
        executor.capture(keys)
        left = 0
        for name, shape in shapes(tiny).items():
            inputs = inputs_of(shape, model)
            for decision in all_decisions(inputs.numbers, registry.captured()):
                key = decision.launches[0].key
                way = f"{decision.mode.value} {key.num_tokens}" if key else decision.mode.value
                if len(decision.launches) > 1 or f"{name}/{way}" in results.cells:
                    continue
                if results.elapsed() > options.seconds:
                    left += 1
                    continue
                cell = measure(executor, decision, inputs, options.device)
                results.put(f"{name}/{way}", cell)
                told = {figure: cell[figure] for figure in ("wall_us", "host_us", "device_us", "kernels", "families")}
                print(f"{name}, {way}: {told}", flush=True)
        executor.release()
    results.write()
    if left:
        print(f"{left} ways weren't measured for want of time; call it again to go on", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
