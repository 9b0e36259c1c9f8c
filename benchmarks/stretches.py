"""Parts of recorded traces that several benchmarks serve."""

from __future__ import annotations

from kpolicy.scheduling.traces import Trace

__all__ = ["FILES", "middle"]

FILES = {
    "conversation": "azure_llm_2023_conv.csv", "code": "azure_llm_2023_code.csv",
    "mooncake": "mooncake_conversation.csv.gz", "burstgpt": "burstgpt_1_first400.csv",
}  # fmt: skip
"""The published traces, by the name that loads have"""


def middle(trace: Trace, count: int, *, longest: int) -> Trace:
    """So many requests from a trace's middle, as they arrived, of those of at most `longest` tokens."""
    trace = trace.limited(longest)
    first = max(0, (len(trace) - count) // 2)
    chosen = trace.requests[first : first + count]
    return trace.window(chosen[0].arrival_s, chosen[-1].arrival_s - chosen[0].arrival_s + 1e-6)
