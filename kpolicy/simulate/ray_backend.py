"""Cases of a sweep on a Ray cluster that is there already, or on one of this machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from kpolicy.errors import ConfigError
from kpolicy.observe.extras import load
from kpolicy.simulate.cases import Case, Common, lost_case, run_case

__all__ = ["RayBackend"]


@attrs.frozen
class RayBackend:
    """Ray's workers, which must have the same kpolicy installed.

    Args:
        address: the cluster, as ``ray.init`` takes it; ``auto`` is the one that this machine belongs to, ``local``
            starts one here for as long as the sweep takes.
    """

    address: str = "auto"

    def run(self, cases: Sequence[Case], common: Common) -> Iterator[dict[str, Any]]:
        """The line of each case, as they finish."""
        ray = load("ray", extra="ray", package="ray", what="--backend ray")
        ours = not ray.is_initialized()
        if ours:
            _check_there(self.address)
            try:
                ray.init(address=self.address, log_to_driver=False, logging_level="ERROR")
            except Exception as error:  # noqa: BLE001 - whatever Ray raises, there is no cluster
                raise _no_cluster(self.address, f"{type(error).__name__}: {_why(error)}") from None
        try:
            # Traces and cost tables travel once; workers read them from the object store.
            shared = ray.put(common)
            work = ray.remote(num_cpus=1, max_retries=3)(run_case)
            waiting = {work.remote(case, shared): case for case in cases}
            while waiting:
                (finished,), _ = ray.wait(list(waiting), num_returns=1)
                case = waiting.pop(finished)
                try:
                    line = ray.get(finished)
                except ray.exceptions.RayError as error:
                    line = lost_case(case, f"Ray lost it: {type(error).__name__}: {_why(error)}")
                yield line
        finally:
            if ours:
                ray.shutdown()


def _why(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A task's own exception ends its traceback.
    return (lines[-1] if hasattr(error, "cause") and lines else " ".join(lines))[:200].rstrip(".")


def _check_there(address: str) -> None:
    """See whether anything listens at HOST:PORT, or where `auto` leads: Ray itself tries for minutes."""
    import socket

    if address == "auto":
        found = _this_machines()
        if found and found != "auto":
            try:
                _check_there(found)
            except ConfigError as error:
                raise _no_cluster(address, f"it leads to {found}, where none is") from error
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_PATIENCE_S).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, str(error)) from None


def _this_machines() -> str:
    """What Ray takes `auto` for: its variable, else the cluster that was started here last, which may be gone."""
    if os.environ.get("RAY_ADDRESS"):
        return os.environ["RAY_ADDRESS"]
    folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    try:
        return (folder / "ray" / "ray_current_cluster").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


_PATIENCE_S = 5.0


def _no_cluster(address: str, why: str) -> ConfigError:
    return ConfigError(
        f"no Ray cluster at {address!r}: {why}. Start one with `ray start --head`, or give --ray-address local."
    )
