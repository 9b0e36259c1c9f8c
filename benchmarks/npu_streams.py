"""`auto` against the replicas of vLLM-Ascend and vLLM-Kunlun where graphs may take 1,800 streams.

Each trace is served twice in simulated time. Its first half only tells `auto` which steps there are; all are scored on
the second half. The replicas keep the sizes that their own rule leaves of their default list (the stream formula, even
sampling). `auto` keeps the graphs that `kpolicy.executors.ascend.replan.fitting` chooses under the same budget and
prices, once not knowing the traffic and once knowing the first half's steps.

Models are spread over ranks: a rank holds its share of weights and KV. Collectives aren't modelled, for nobody. Host
costs of launching are those of kpolicy's analytic table, not of these devices. Nothing here ran on either device.

Run from the repository root, with the traces in ``../shared/traces`` (or ``--traces``)::

    python -m benchmarks.npu_streams --date YYYY-MM-DD
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

import kpolicy
from benchmarks.command import input_folder
from kpolicy.attention import AttentionSupport
from kpolicy.attention.support import Claims, HostParams
from kpolicy.budget_models import AscendParallel, BudgetModel, ModelShape, ascend_stream_budget
from kpolicy.budgets import Budget, Usage
from kpolicy.costs import CostTable, analytic_costs
from kpolicy.executors.ascend.replan import Demand, fitting, kinds_of, ladders_of
from kpolicy.figures import find_device, kv_room, model_figures
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureSizes, plan_keys
from kpolicy.modes import Part
from kpolicy.policies import get_policy
from kpolicy.scheduling.traces import Trace, read_trace
from kpolicy.settings import Settings
from kpolicy.simulate import Server, SimStep, simulate
from kpolicy.trace_plan import halves

RESULT = Path(__file__).parent / "results" / "npu_streams.json"
SETTINGS = Settings(max_num_reqs=256, max_num_tokens=2048)
WORKLOADS = (
    ("conversation", "azure_llm_2023_conv.csv", 2.0),
    ("code", "azure_llm_2023_code.csv", 2.0),
    ("Mooncake", "mooncake_conversation.csv.gz", 0.3),
    ("BurstGPT", "burstgpt_1_first400.csv", 1200.0),
)
"""Traces, and how many times as fast as recorded each is served by a model of `Case.load` 1."""
QWEN2_72B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 8192, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 29568, "vocab_size": 152064,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
    "norm_topk_prob": True, "vocab_size": 151936, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip


@attrs.frozen
class Case:
    """A model on a device.

    Args:
        name: what to call it.
        config: the model's.
        device: by name.
        replica: the policy that its plug-in has.
        host: what becomes of lengths on the host.
        tp: tensor-parallel ranks.
        parallel: as the stream formula reads it.
        load: by which a trace's rate is multiplied, so that the server isn't overrun.
    """

    name: str
    config: Mapping[str, Any]
    device: str
    replica: str
    host: HostParams
    tp: int
    parallel: AscendParallel
    load: float = 0.25

    @property
    def support(self) -> AttentionSupport:
        claims = Claims.at_level("mixed", host_params=self.host)
        return AttentionSupport.of(claims, backend=self.replica, source="benchmarks/npu_streams.py")

    @property
    def shape(self) -> ModelShape:
        return ModelShape(num_layers=self.config["num_hidden_layers"], moe="num_experts" in self.config)

    def costs(self) -> CostTable:
        """The analytic table of one rank's share."""
        whole = model_figures(self.config)
        names = ("dense_params", "weight_params", "kv_bytes_per_token", "attention_flops_per_pair")
        share = attrs.evolve(
            whole, name=f"{whole.name}/{self.tp}", **{name: getattr(whole, name) // self.tp for name in names}
        )
        return analytic_costs(share, find_device(self.device).figures)

    def server(self) -> Server:
        whole, device = model_figures(self.config), find_device(self.device)
        share = attrs.evolve(
            whole, weight_params=whole.weight_params // self.tp,
            kv_bytes_per_token=max(1, whole.kv_bytes_per_token // self.tp),
        )  # fmt: skip
        return Server(settings=SETTINGS, kv_tokens=kv_room(share, device), warm=True)


CASES = (
    Case("Qwen2-72B, tp 8", QWEN2_72B, "Ascend 910B", "ascend", HostParams.UPDATABLE, 8, AscendParallel(tp=8)),
    Case("Qwen3-30B-A3B, tp 4", QWEN3_30B_A3B, "Ascend 910B", "ascend", HostParams.UPDATABLE, 4,
         AscendParallel(tp=4, ep=True, aiv=True), 1.0),
    Case("Qwen2-72B, tp 8", QWEN2_72B, "Kunlun P800", "kunlun", HostParams.FROZEN, 8, AscendParallel(tp=8)),
    Case("Qwen2-72B, tp 8, lengths proven live", QWEN2_72B, "Kunlun P800", "kunlun", HostParams.NONE, 8,
         AscendParallel(tp=8)),
)  # fmt: skip


def streams(case: Case, num_sizes: int, parts: Sequence[Part]) -> BudgetModel:
    """The 1,800 streams and what a graph takes of them."""
    return ascend_stream_budget(case.shape, case.parallel, num_sizes=num_sizes, parts=parts)


def replica_sizes(case: Case) -> CaptureSizes:
    """What the replica's rule keeps of its default list: one list for both parts."""
    policy = get_policy(case.replica)
    sizes = policy.sizes(SETTINGS)
    parts = {key.part for key in policy.plan(sizes, case.support.claims, SETTINGS)}
    model = streams(case, len(sizes.piecewise), sorted(parts))
    kept = frozenset(model.keep(sizes.piecewise)) if Part.PIECEWISE in parts else frozenset(sizes.decode)
    pick = lambda each: tuple(size for size in each if size in kept)  # noqa: E731
    return CaptureSizes(pick(sizes.decode), pick(sizes.mixed), pick(sizes.piecewise))


def auto_sizes(case: Case, costs: CostTable, demand: Demand | None) -> CaptureSizes:
    """The sizes of the graphs that fit, of all that `auto` plans."""
    policy = get_policy("auto")
    keys = policy.plan(policy.sizes(SETTINGS), case.support.claims, SETTINGS)
    model = attrs.evolve(streams(case, 0, tuple(Part)), num_sizes=None)
    kept = fitting(keys, model.budget, model, costs, demand)
    spent = sum((model.cost_of(key) for key in kept), Usage())
    assert model.budget.refuses(Usage(), spent) is None
    full = [key for key in kept if key.part is Part.FULL]
    return CaptureSizes(
        tuple(sorted({key.num_tokens for key in full if key.query_len})),
        tuple(sorted({key.num_tokens for key in full if not key.query_len})),
        tuple(sorted({key.num_tokens for key in kept if key.part is Part.PIECEWISE})),
    )


def seen(case: Case, costs: CostTable, trace: Trace) -> Demand:
    """The steps of a trace by number of tokens: decodes alone, and all others."""
    decodes: Counter[int] = Counter()
    others: Counter[int] = Counter()

    def note(step: SimStep) -> None:
        numbers = step.step.numbers
        (others if numbers.num_prefills else decodes)[numbers.total_tokens] += 1

    simulate(
        trace, "auto", server=case.server(), costs=costs, attention=case.support, ladder=replica_sizes(case),
        on_step=note,
    )  # fmt: skip

    whole = case.support.claims.full.uniform_query_len > 0

    def demand(key: GraphKey, tokens: int) -> float:
        if key.part is Part.FULL and key.query_len:
            return float(decodes[tokens])
        # Without FULL graphs decodes replay pieces too.
        return float(others[tokens] + (0 if whole else decodes[tokens]))

    return demand


def run(case: Case, costs: CostTable, policy: str, sizes: CaptureSizes, trace: Trace) -> dict[str, Any]:
    found = simulate(
        trace, policy, server=case.server(), costs=costs, attention=case.support, ladder=sizes
    )  # fmt: skip
    modes = found.modes.values()
    steps, tokens = sum(each.steps for each in modes), sum(each.tokens for each in modes)
    model = streams(case, 0, tuple(Part))
    keys = plan_keys(sizes, case.support.claims, SETTINGS)
    return {
        "policy": policy,
        "busy_s": sum(each.us for each in modes) / 1e6,
        "step_us": sum(each.us for each in modes) / steps,
        "padding": sum(each.padding for each in modes) / tokens,
        "eager_steps": found.modes["eager"].steps / steps if "eager" in found.modes else 0.0,
        "gap_p50_us": found.gap.p50,
        "gap_p99_us": found.gap.p99,
        "keys": found.graphs,
        "device_graphs": sum(1 if key.part is Part.FULL else case.shape.pieces for key in keys),
        "streams": sum(model.cost_of(key).streams for key in keys),
        "steps": steps,
        "sizes": {
            name: ",".join(map(str, getattr(sizes, name))) for name in ("decode", "mixed", "piecewise")
        },
    }  # fmt: skip


def replanned(most: int) -> dict[str, Any]:
    """Planning anew under every number of streams from 1: whether all fit, and how far from the exact optimum.

    The optimum is worked out anew in `tests/executors_ascend/test_budget.py`, over a 48-layer MoE model on four ranks.
    """
    from tests.executors_ascend.test_budget import PLANNED, UNITS, optima

    costs, kinds = analytic_costs(), kinds_of(PLANNED)
    ladders = ladders_of(kinds, UNITS, costs, None)
    best = optima(ladders)
    worst, over = 0.0, 0
    for count in range(1, most + 1):
        kept = fitting(PLANNED, Budget(streams=count), UNITS, costs)
        over += sum((UNITS.cost_of(key) for key in kept), Usage()).streams > count
        held = kinds_of(kept)
        mine = sum(each.time_us(sorted(held.get(kind, {}))) for kind, each in zip(kinds, ladders, strict=True))
        worst = max(worst, mine / best(count) - 1)
    return {"streams": [1, most], "plans_that_do_not_fit": over, "worst_against_optimum": worst}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=input_folder, default="../shared/traces", help="the folder with the traces")
    parser.add_argument("--date", default="", help="written into the result; without it nothing is written")
    parser.add_argument("--streams", type=int, default=2048, help="the most streams to plan anew under")
    arguments = parser.parse_args()
    plans = replanned(arguments.streams)
    print(plans, flush=True)
    rows = []
    for case in CASES:
        costs = case.costs()
        for name, file, rate in WORKLOADS:
            first, second = halves(read_trace(arguments.traces / file).scaled(rate * case.load))
            name = f"{name} x{rate * case.load:g}"
            ways = {
                case.replica: (case.replica, replica_sizes(case)),
                "auto": ("auto", auto_sizes(case, costs, None)),
                "auto, first half known": ("auto", auto_sizes(case, costs, seen(case, costs, first))),
            }
            found = {label: run(case, costs, policy, sizes, second) for label, (policy, sizes) in ways.items()}
            base = found[case.replica]["busy_s"]
            rows.append({"model": case.name, "device": case.device, "trace": name, "ways": found})
            for label, each in found.items():
                print(
                    f"{case.device:12s} {case.name:36s} {name:16s} {label:23s} {each['busy_s']:7.0f} s "
                    f"({each['busy_s'] / base - 1:+.1%})  step {each['step_us'] / 1e3:.1f} ms  gap p99 "
                    f"{each['gap_p99_us'] / 1e3:.1f} ms  padding {each['padding']:.1%}  eager "
                    f"{each['eager_steps']:.1%}  keys {each['keys']}  graphs {each['device_graphs']}  streams "
                    f"{each['streams']}",
                    flush=True,
                )
    if arguments.date:
        written = {
            "what": "mean simulated step time, padding and graphs under 1,800 streams, on each trace's second half",
            "date": arguments.date,
            "command": f"python -m benchmarks.npu_streams --date {arguments.date}",
            "kpolicy": kpolicy.__version__,
            "python": platform.python_version(),
            "device": "none: simulated with published figures",
            "settings": attrs.asdict(SETTINGS),
            "replanning": plans,
            "rows": rows,
        }
        RESULT.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
