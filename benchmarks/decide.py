"""What deciding costs, beside vLLM's own dispatchers, in one process and one run.

Run from the repository root, with vLLM 0.33.0's wheel (unpacked or not) in a folder::

    KPOLICY_ORACLE=FOLDER python -m benchmarks.decide --date YYYY-MM-DD

Each pass draws batches of its own and decides each once; passes of all contestants alternate, and the best of each is
taken, because everything else only adds time. Without the folder vLLM's columns are left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kpolicy
from kpolicy.attention.support import Claims, SupportLevel
from kpolicy.costs import analytic_costs
from kpolicy.engine import Engine
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureLadder
from kpolicy.modes import Mode, Part
from kpolicy.policies import OWN, PolicyContext, get_policy
from kpolicy.settings import Settings
from kpolicy.shapes import BatchNumbers, BatchShape

RESULT = Path(__file__).parent / "results" / "decide.json"
BATCHES = 20_000
PASSES = 9
MAX_REQS = 256
SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""vLLM's default list up to 512."""


KINDS = ("decode", "mixed", "mix")
SPECIAL = {
    "mixed, up to 8 decode steps beside": {"max_decode_steps": 8},
    "mixed, LoRA": {"num_active_loras": 2},
    "decode, LoRA": {"num_active_loras": 2},
    "mixed, PIECEWISE forbidden": {"forbidden": (Mode.PIECEWISE,)},
    "decode, partial drafts": {},
}
"""Batches that only `auto` is asked about: what vLLM's dispatchers are told of a batch can't say these."""


def draw(kind: str, rng: random.Random) -> tuple[int, int]:
    """(decode rows, prompt tokens); seven in ten batches of a mix are decodes."""
    decodes = rng.randint(1, MAX_REQS)
    if kind.startswith("decode") or (kind == "mix" and rng.random() < 0.7):
        return decodes, 0
    return rng.randint(0, 64), rng.randint(1, 2048)


def shape_of(kind: str, batch: tuple[int, int], rng: random.Random) -> BatchShape:
    decodes, prompt = batch
    runs = ((1, decodes),) if decodes else ()
    if kind == "decode, partial drafts" and decodes > 1:
        runs = ((4, decodes // 2), (rng.randint(1, 3), decodes - decodes // 2))
    return BatchShape(
        decodes=runs,
        prefills=((prompt, 0),) if prompt else (),
        decode_kv_tokens=decodes * rng.randint(4, 4000) if decodes else None,
        **SPECIAL.get(kind, {}),
    )


@contextmanager
def vllm_calls() -> Iterator[dict[str, Callable[[int, int], Any]]]:
    """The real dispatch of vLLM 0.33's two runners, FULL_AND_PIECEWISE, by (decodes, prompt tokens)."""
    from tests.oracle.configs import Deployment
    from tests.oracle.loader import loaded, oracle_folder
    from tests.oracle.vllm_real import RealVllm

    folder = oracle_folder()
    if folder is None:
        yield {}
        return
    settings = Settings(max_num_reqs=MAX_REQS)
    claims = Claims.at_level("mixed")
    deployments = {
        runner: Deployment(
            get_policy(f"vllm:version=0.33,runner={runner}"), SupportLevel.MIXED, claims, settings, SIZES
        )
        for runner in ("v1", "v2")
    }
    with loaded(folder, "0.33") as release:
        real = {runner: RealVllm(release, "0.33", runner) for runner in deployments}
        for runner, deployment in deployments.items():
            real[runner].start(deployment)
        v1, v2 = real["v1"]._dispatcher.dispatch, real["v2"].manager.dispatch

        def by_v1(decodes: int, prompt: int) -> Any:
            return v1(decodes + prompt, not prompt)

        def by_v2(decodes: int, prompt: int) -> Any:
            return v2(decodes + (prompt > 0), decodes + prompt, None if prompt else 1, 0, None if prompt else 1)

        yield {"vllm 0.33 v1 dispatcher": by_v1, "vllm 0.33 v2 manager": by_v2}


Convert = Callable[[tuple[int, int], BatchShape], Sequence[Any]]


def contestants(kind: str, vllm: dict[str, Callable[[int, int], Any]]) -> dict[str, tuple[Callable[..., Any], Convert]]:
    """Name -> (call, the call's arguments from a batch). Every contestant decides the same batches."""
    settings = Settings(max_num_reqs=MAX_REQS)
    found: dict[str, tuple[Callable[..., Any], Convert]] = {
        name: (call, lambda batch, _shape: batch) for name, call in vllm.items()
    }
    for spec in (*OWN, "vllm:runner=v1"):
        select = Engine(spec, settings=settings).select
        few = 3 if kind == "decode" else len(BatchNumbers._fields)
        found[f"select {spec}"] = (select, lambda _batch, shape, few=few: shape.numbers[:few])
    engine = Engine("auto", settings=settings)

    def decide(decodes: Any, prefills: Any, kv_tokens: int | None) -> Any:
        return engine.decide(BatchShape(decodes=decodes, prefills=prefills, decode_kv_tokens=kv_tokens))

    found["decide auto, shape made"] = (
        decide,
        lambda _batch, shape: (shape.decodes, shape.prefills, shape.numbers.decode_kv_tokens or None),
    )
    return found


def special_contestant(kind: str) -> dict[str, tuple[Callable[..., Any], Convert]]:
    settings = Settings(
        max_num_reqs=MAX_REQS,
        max_loras=4 if "LoRA" in kind else 0,
        num_speculative_tokens=3 if "drafts" in kind else 0,
    )
    attention = Claims.at_level("mixed")
    select = Engine("auto", attention=attention, settings=settings).select
    return {kind: (select, lambda _batch, shape: shape.numbers)}


def measure(kind: str, found: dict[str, tuple[Callable[..., Any], Convert]], passes: int) -> dict[str, float]:
    """Microseconds a call, the best of alternating passes. Each pass draws batches of its own."""
    best = dict.fromkeys(found, float("inf"))
    for seed in range(passes):
        rng = random.Random(seed)
        batches = [draw(kind, rng) for _ in range(BATCHES)]
        shapes = [shape_of(kind, batch, rng) for batch in batches]
        for name, (call, convert) in found.items():
            arguments = [convert(batch, shape) for batch, shape in zip(batches, shapes, strict=True)]
            gc.collect()
            gc.disable()
            best[name] = min(best[name], timed(call, arguments))
            gc.enable()
    return {name: round(us, 3) for name, us in best.items()}


def timed(call: Callable[..., Any], arguments: Sequence[Any]) -> float:
    start = time.perf_counter()
    for each in arguments:
        call(*each)
    return (time.perf_counter() - start) / len(arguments) * 1e6


def compile_figures() -> dict[str, float]:
    """Milliseconds to compile a ladder of 2,048 keys, and the memory that the compiled policy keeps."""
    decode = [GraphKey(Part.FULL, size, size, query_len=1) for size in range(1, 1025)]
    pieces = [GraphKey(Part.PIECEWISE, size) for size in range(2, 2049, 2)]
    context = PolicyContext(
        claims=Claims.at_level("uniform"),
        ladder=CaptureLadder([*decode, *pieces]),
        costs=analytic_costs(),
        settings=Settings(max_num_reqs=1024),
    )
    policy = get_policy("auto")
    times = []
    for _ in range(7):
        start = time.perf_counter()
        policy.compile(context)
        times.append((time.perf_counter() - start) * 1e3)
    gc.collect()
    tracemalloc.start()
    compiled = policy.compile(context)
    gc.collect()
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert compiled is not None
    return {"keys": len(context.ladder), "compile_ms": round(min(times), 2), "memory_kb": round(kept / 1e3, 1)}


FIRST = """
import time; start = time.perf_counter()
from kpolicy import BatchShape, Engine
Engine(policy="auto").decide(BatchShape.decode(9))
took = (time.perf_counter() - start) * 1e3
import sys
print(took, *(name for name in ("torch", "numpy", "structlog", "cattrs") if name in sys.modules))
"""


def first_decision() -> dict[str, Any]:
    """Milliseconds of import plus first decision in fresh interpreters, the best of nine, and what was loaded."""
    runs = [subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=True) for _ in range(9)]
    words = [run.stdout.split() for run in runs]
    return {"ms": round(min(float(each[0]) for each in words), 1), "heavy_modules_loaded": words[0][1:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=PASSES, help="passes over all contestants")
    parser.add_argument("--date", default="", help="written into the result; without it nothing is written")
    arguments = parser.parse_args()
    firsts = [first_decision()]
    compiled = compile_figures()
    special: dict[str, float] = {}
    with vllm_calls() as vllm:
        figures = {kind: measure(kind, contestants(kind, vllm), arguments.passes) for kind in KINDS}
    firsts.append(first_decision())
    for kind in SPECIAL:
        special |= measure(kind, special_contestant(kind), arguments.passes)
    # Asked for at three moments: a shared machine is at times half as fast.
    first = min((*firsts, first_decision()), key=lambda each: each["ms"])
    v1, v2 = "vllm 0.33 v1 dispatcher", "vllm 0.33 v2 manager"
    for kind, times in figures.items():
        print(f"\n{kind}: us a call, of v1, of v2")
        for name, us in times.items():
            ratios = "".join(f"{us / times[other]:>8.2f}" for other in (v1, v2) if other in times)
            print(f"  {name:<34}{us:>9.3f}{ratios}")
    print("\nselect auto, other batches: us a call")
    for name, us in special.items():
        print(f"  {name:<36}{us:>7.3f}")
    heavy = first["heavy_modules_loaded"] or "none"
    print(f"\nimport and first decision: {first['ms']} ms, heavy modules loaded: {heavy}")
    print(f"compile {compiled['keys']} keys: {compiled['compile_ms']} ms, keeps {compiled['memory_kb']} kB")
    if arguments.date:
        written = {
            "what": "time to decide; microseconds a call, best of alternating passes",
            "date": arguments.date,
            "command": f"KPOLICY_ORACLE=FOLDER python -m benchmarks.decide --passes {arguments.passes} "
            f"--date {arguments.date}",
            "kpolicy": kpolicy.__version__,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "batches": BATCHES,
            "us": figures,
            "us_auto_other_batches": special,
            "first_decision": first,
            "compile": compiled,
        }
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(written, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
