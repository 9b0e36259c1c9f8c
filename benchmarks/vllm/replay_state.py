"""The two speeds at which an H200 replays graphs: a benchmark asks for either.

A kernel that is launched by itself on a second stream, as in the warm-ups of captures, makes replays of that process
slow until any process makes a context (docs/measured_gpu.md, two speeds of a replay). Sides that share a GPU make each
other's quick, so a state is brought about before each turn. Inside vLLM no difference was seen (docs/measured_vllm.md,
replays' two speeds inside vLLM).
"""

from __future__ import annotations

import time

from kpolicy.errors import ConfigError

__all__ = ["QUICK", "SLOW", "STATES", "bring_about"]

SLOW, QUICK = "slow", "quick"
STATES = (SLOW, QUICK)
WARM_BYTES = 64 << 20
"""Allocated, written and freed on the second stream, as warm-ups do"""


def bring_about(state: str) -> dict[str, float | str]:
    """Have graphs of this process replay at that speed from now on; how long that took, in milliseconds.

    Args:
        state: of `STATES`: what a capture's warm-ups leave, or what a context for a moment does.

    Raises:
        ConfigError: no such state, or no context could be made.
    """
    import torch

    from kpolicy.executors.cuda.second_context import second_context

    torch.cuda.synchronize()
    start = time.perf_counter()
    if state == QUICK:
        why = second_context(torch.cuda.current_device())
        if why:
            raise ConfigError(f"there is no second context, so replays can't be made quick: {why}")
    elif state == SLOW:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                torch.zeros(WARM_BYTES, dtype=torch.uint8, device="cuda").add_(1)
        stream.synchronize()
        torch.cuda.empty_cache()
    else:
        raise ConfigError(f"replays are {' or '.join(STATES)}, not {state!r}.")
    torch.cuda.synchronize()
    return {"state": state, "ms": round(1e3 * (time.perf_counter() - start), 3)}
