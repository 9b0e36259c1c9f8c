"""Loads that both sides of a comparison serve: requests with an arrival, a prompt length and an output length.

Decode loads and bursts arrive at once. The others keep a trace's order, lengths and relative arrivals; only the rate is
changed, and requests longer than the engine takes are left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from kpolicy.errors import ConfigError
from kpolicy.scheduling.traces import read_trace

__all__ = ["LOADS", "Load", "Rates", "make_load"]

CODE, CHAT = "azure_llm_2023_code.csv", "azure_llm_2023_conv.csv"
MAX_TOKENS = 4096
"""Prompt and output of a request together"""


class Load(NamedTuple):
    """What is served in one run.

    Args:
        name: what results call it.
        requests: (arrival in seconds, prompt tokens, output tokens).
        step_tokens: tokens a step may have; None leaves the engine's own limit.
    """

    name: str
    requests: list[tuple[float, int, int]]
    step_tokens: int | None = None


class Rates(NamedTuple):
    """How much of each trace a model is given: requests, and requests a second on average."""

    code_requests: int
    code_rate: float
    chat_requests: int
    chat_rate: float


RATES = {
    "qwen05b": Rates(240, 320.0, 120, 40.0),
    "llama8b": Rates(64, 48.0, 120, 15.0),
    "dsv2lite": Rates(96, 80.0, 120, 15.0),
}
"""Code arrives faster than either side serves it; chat at a rate that both keep up with. Few requests, so that a turn
takes seconds: a virtual machine's host changes speed within tens of them, and many short turns tell that apart. Of chat
120: of the first 30 prompts a quarter is longer than 512 tokens, of these two fifths, of the whole trace over half."""

LOADS = ("decode-768-64", "decode-1000-64", "burst-768", "code-2048", "code-8192", "chat")
OUTPUTS, BURST_OUTPUTS = 160, 4
"""Tokens of each request, where a decode load's name doesn't say; and of a burst, which is there for first tokens"""
TURNS = {"burst": 3}
"""Turns of a load in one repeat, by its kind; one of the others"""


def make_load(name: str, model: str, traces: Path, *, scale: float = 1.0) -> Load:
    """The load of that name for a model.

    Args:
        name: ``decode-N-O`` is N requests at once of O tokens each (`OUTPUTS` without ``-O``); ``burst-N`` the same of
            `BURST_OUTPUTS`; ``code-N`` the code trace at steps of at most N tokens; ``chat`` the conversation trace.
        model: of `RATES`.
        traces: folder of the trace files.
        scale: share of the requests, for a quick look.

    Raises:
        ConfigError: no such load.
    """
    kind, *numbers = name.split("-")
    number = numbers[0] if len(numbers) == 1 else ""
    if kind == "decode" and len(numbers) in (1, 2) and all(each.isdigit() for each in numbers):
        outputs = int(numbers[1]) if len(numbers) == 2 else OUTPUTS
        return Load(name, [(0.0, 32, max(8, round(outputs * scale)))] * int(numbers[0]))
    if kind == "burst" and number.isdigit():
        return Load(name, [(0.0, 32, BURST_OUTPUTS)] * int(number))
    rates = RATES[model]
    if kind == "code" and number.isdigit():
        requests = _trace(traces / CODE, round(rates.code_requests * scale), rates.code_rate)
        return Load(name, requests, int(number))
    if name == "chat":
        return Load(name, _trace(traces / CHAT, round(rates.chat_requests * scale), rates.chat_rate))
    raise ConfigError(f"there is no load {name!r}; take one of {', '.join(LOADS)}, or decode-N-O, burst-N or code-N.")


def _trace(path: Path, count: int, rate: float) -> list[tuple[float, int, int]]:
    trace = read_trace(path).limited(MAX_TOKENS).first(count)
    factor = count / rate / trace.span_s if trace.span_s else 0.0
    start = trace.requests[0].arrival_s
    return [((one.arrival_s - start) * factor, one.prompt_tokens, one.output_tokens) for one in trace.requests]
