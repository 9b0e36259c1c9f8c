"""Serving without a device: a trace through the scheduler, the policy and a cost table, in counts and simulated time.

::

    from kpolicy.scheduling.traces import read_trace
    from kpolicy.simulate import simulate

    trace = read_trace("azure_llm_2023_conv.csv")
    for policy in ("auto", "vllm"):
        print(policy, simulate(trace, policy).gap.p50)
"""

from kpolicy.simulate.drafts import Drafts
from kpolicy.simulate.percentiles import Spread
from kpolicy.simulate.result import SimResult
from kpolicy.simulate.run import DecodeRun, SimStep, simulate
from kpolicy.simulate.server import Server, ServiceLevel

__all__ = ["DecodeRun", "Drafts", "Server", "ServiceLevel", "SimResult", "SimStep", "Spread", "simulate"]
