"""The sides of a comparison: stock vLLM, vLLM with the shim, and what tells the ladder's part from the policy's.

- ``stock``: vLLM as it comes, 51 sizes to 512.
- ``kpolicy``: the shim with its own ladder.
- ``wide``: stock vLLM, told by its own flag to capture every size of the shim's ladder.
- ``planned``: the shim with a ladder of `kpolicy plan`.
- ``paced``: the shim with steps bounded by what the gap between tokens is worth.
- ``split``: the shim for short gaps, which may run decodes and prompts in steps of their own.
- ``lazy``: the shim that starts with few graphs and captures others once they are hot.
- ``again``: stock vLLM in a process of its own once more: how far two that are the same lie apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kpolicy.settings import Settings
from kpolicy_vllm.ladder import default_sizes, one_list, wide_layers

__all__ = ["PACED", "SIDES", "arguments_of"]

SIDES = ("stock", "kpolicy", "wide", "planned", "paced", "split", "lazy", "again")
PACED = {"objective": "1:1"}
"""A weight of the gap at which code, decodes and chat are served as fast as by stock or faster in simulated time, but
for 1% on the quickest host (`benchmarks.vllm.simulated`)"""

OTHERWISE: Mapping[str, Mapping[str, Any]] = {
    "split": {"objective": "0:1:2", "pace": False, "split": True, "split_decodes": 4},
    "lazy": {"lazy": True},
}
"""Settings of the shim that these sides have besides. SPLIT's prompts may take twice the best for them: within the 1.25
of ``latency`` it divided none of 1,902 steps of the code and conversation traces"""


def arguments_of(name: str, shim: dict[str, Any], *, max_seqs: int, max_tokens: int, plan: Path | None = None,
                 paced: Mapping[str, Any] = PACED, model: Path | None = None) -> dict[str, Any]:  # fmt: skip
    """Arguments of vllm.LLM that make the side.

    Args:
        name: of `SIDES`.
        shim: what turns the shim on, such as ``{"additional_config": {"kpolicy": {}}}``.
        max_seqs: requests a step may have.
        max_tokens: tokens a step may have.
        plan: the plan file of ``planned``.
        paced: settings of the shim for ``paced``.
        model: folder of the model's ``config.json``, which tells ``wide`` whether the shim takes its layers for wide;
            thin ones without it.

    Raises:
        ValueError: no such side, or ``planned`` without a plan.
    """
    if name in ("stock", "again"):
        return {}
    if name == "kpolicy":
        return shim
    if name == "wide":
        config = model / "config.json" if model is not None else None
        layers = json.loads(config.read_text()) if config is not None and config.is_file() else {}
        settings = Settings(max_num_reqs=max_seqs, max_num_tokens=max_tokens)
        sizes = one_list(default_sizes(settings, wide=wide_layers(SimpleNamespace(**layers))))
        return {"compilation_config": {"cudagraph_capture_sizes": sizes}}
    planned = {} if plan is None else {"planned": {"plan": str(plan.resolve())}}
    more = {"paced": paced, **planned, **OTHERWISE}.get(name)
    if more is not None:
        told: dict[str, Any] = json.loads(json.dumps(shim))
        told["additional_config"]["kpolicy"].update(more)
        return told
    raise ValueError(f"side {name!r} can't be had; take one of {', '.join(SIDES)}, planned with --plan.")
