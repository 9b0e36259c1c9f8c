"""A simulation and a plan as one HTML page that needs no network, and as plots.

::

    from kpolicy.report import gather, page
    from kpolicy.scheduling.traces import read_trace

    report = gather([read_trace("azure_llm_2023_conv.csv").window(0, 300)], ["auto", "vllm"])
    Path("report.html").write_text(page(report))
"""

from kpolicy.report.gather import Report, TraceReport, gather
from kpolicy.report.page import page
from kpolicy.report.runs import Run

__all__ = ["Report", "Run", "TraceReport", "gather", "page"]
