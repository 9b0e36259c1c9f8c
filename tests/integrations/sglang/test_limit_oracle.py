"""What SGLang's own budget makes of the chunk that a limit on gaps gives it, out of the wheel."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest

from kpolicy_sglang.config import Config
from kpolicy_sglang.split import split_of
from tests.integrations.sglang.test_oracle import pytestmark, release_of  # noqa: F401  skips without the wheels
from tests.integrations.sglang.test_split import limited
from tests.oracle.sglang_real import _class, _execute

FILE = "sglang/srt/managers/schedule_policy.py"


def adder(release):
    """SGLang's `add_chunked_req` over the two lines of its constructor that set the budget of a chunk."""
    (whole,) = (node for node in release.tree(FILE).body if getattr(node, "name", "") == "PrefillAdder")
    methods = {node.name: node for node in whole.body if isinstance(node, ast.FunctionDef)}
    init = methods["__init__"]
    init.body = [node for node in init.body if ast.unparse(node).startswith((
        "self.rem_chunk_tokens = ", "if self.rem_chunk_tokens is not None"))]  # fmt: skip
    assert len(init.body) == 2
    names = {"CLIP_MAX_NEW_TOKENS": 4096}
    return _execute([_class("Adder", [init, methods["add_chunked_req"]])], names)["Adder"]


class Request(SimpleNamespace):
    """A prompt under way."""

    def set_extend_range(self, start, end):
        """As SGLang's."""
        self.extend_range = SimpleNamespace(start=start, end=end, length=end - start)


@pytest.mark.parametrize("decodes", [1, 480, 600, 1500])
def test_a_prompt_under_way_goes_on_beside_many_decodes(decodes):
    """0.5.16 runs what is left of the chunk without the decodes, and a negative length where that is negative."""
    scheduler, seen = limited(11.4, waiting=1), []
    scheduler.is_mixed_chunk = True
    scheduler.tp_worker.model_runner._kpolicy_state.config = Config(gap_ms=11.4, split=False)
    scheduler.chunked_req = Request(
        origin_input_ids=range(4000), full_untruncated_fill_ids=range(4000), prefix_indices=range(512),
        sampling_params=SimpleNamespace(max_new_tokens=9), retracted_stain=0,
    )  # fmt: skip
    made = adder(release_of("0.5.16"))

    def own(scheduler, running):
        mixed = len(running.reqs) if scheduler.is_mixed_chunk else 0
        budget = made(1, None, None, running, 0.5, 10**6, scheduler.chunked_prefill_size, mixed)
        budget.__dict__.update(
            dllm_config=None, rem_total_tokens=10**6, is_hybrid_swa=False, can_run_list=[],
            _update_prefill_budget=lambda *_, **__: None, _mamba_gap_budget_for_req=lambda _: 0,
        )  # fmt: skip
        budget.add_chunked_req(scheduler.chunked_req)
        seen.append(scheduler.chunked_req.extend_range.length)
        return SimpleNamespace(batch_to_run="mixed", running_batch=running)

    split_of(scheduler).step(own, SimpleNamespace(reqs=[0] * decodes))
    assert seen == [min(512, 2048 - decodes)]
