"""`LiveLengthsLauncher`: `GraphLauncher` of a device that rewrites nothing in its graphs."""

from __future__ import annotations

from kpolicy.attention import AttentionSupport, HostParams
from kpolicy.errors import CaptureError
from kpolicy.executors.base import CaptureReport
from kpolicy.executors.launcher import GraphLauncher, LauncherPool
from kpolicy.executors.segments import FullGraph, PieceGraph
from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy.reasons import Reason

__all__ = ["LiveLengthsLauncher"]


class LiveLengthsLauncher(GraphLauncher):
    """Captures FULL graphs only of attention that reads its lengths on the device."""

    def capture(self, key: GraphKey, pool: LauncherPool) -> tuple[FullGraph | PieceGraph, CaptureReport]:
        support: AttentionSupport | None = getattr(self.model, "support", None)
        if key.part is Part.FULL and support is not None and support.claims.host_params is not HostParams.NONE:
            raise CaptureError(
                Reason.HOST_LENGTHS_FROZEN,
                f"{key}: its attention ({support}) takes lengths on the host, and nothing rewrites those of a graph on "
                f"{self.adapter.name}. Capture PIECEWISE, or use attention that reads them on the device.",
            )
        return super().capture(key, pool)
