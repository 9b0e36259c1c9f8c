"""Near saturation throughput delays no prompt: by default first tokens and gaps are those of vLLM's rule, or better."""

from __future__ import annotations

import attrs
import pytest

from kpolicy.profiles import load_profile
from kpolicy.scheduling.generator import generate_trace
from kpolicy.settings import GAP_FIRST_TOKEN_LIMIT, Objective, Settings
from kpolicy.simulate import Server, SimResult, simulate

PROFILE = load_profile("llama-3.1-8b-h200")
SERVER = Server(
    settings=Settings(max_num_reqs=256, max_num_tokens=2048), kv_tokens=1 << 18, warm=True,
    kv_bytes_per_token=PROFILE.kv_bytes_per_token,
)  # fmt: skip


def served(seed: int, load: float) -> dict[str, SimResult]:
    """600 generated requests at so many times what can be served, by each rule; as `auto` is and as it may be told."""
    trace = generate_trace(seed=seed, num_requests=600)
    at_once = attrs.evolve(trace, requests=[attrs.evolve(each, arrival_s=0.0) for each in trace.requests])

    def run(of: object, policy: str, objective: Objective | str = "throughput") -> SimResult:
        return simulate(of, policy, server=SERVER, costs=PROFILE.costs, objective=objective)  # type: ignore[arg-type]

    arriving = trace.scaled(load * trace.span_s / run(at_once, "full_and_piecewise").span_s)
    return {
        "vllm": run(arriving, "vllm"), "auto": run(arriving, "auto"),
        "later": run(arriving, "auto", Objective(first_token_limit=GAP_FIRST_TOKEN_LIMIT)),
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_first_tokens_near_saturation_are_no_later_than_by_vllm_s_rule(seed: int) -> None:
    """Nor are gaps longer, at p50 and p99; where prompts may be delayed their medians are a tenth later and more."""
    found = served(seed, 0.9)
    vllm, auto, later = found["vllm"], found["auto"], found["later"]
    for figure in ("ttft", "gap"):
        for at in ("p50", "p99"):
            assert getattr(getattr(vllm, figure), at) >= 0.99 * getattr(getattr(auto, figure), at), (figure, at)
    assert auto.tokens == later.tokens == vllm.tokens
    assert later.ttft.p50 > 1.1 * vllm.ttft.p50
    assert later.ttft.p50 > 1.1 * auto.ttft.p50
    assert "split/decodes_beside" not in auto.modes
    assert later.modes["split/decodes_beside"].steps > 20
