"""`VendorExecutor`: kpolicy on a vendor's device. All that is particular to the device is in this file.

Replace `kpolicy_vendor.stand_in` by the vendor's own namespace (`torch.musa`, `torch.mlu`, `torch.gcu`, or `torch.cuda`
where the vendor answers for it), and what `begin`, `meaning` and `prove` say by what is true there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from kpolicy.errors import ConfigError
from kpolicy.executors import ProbeReport, ProbeStatus
from kpolicy.executors.device import Failure, known
from kpolicy.executors.xpu import StreamAdapter, StreamExecutor
from kpolicy.reasons import Reason

__all__ = ["VendorExecutor"]


class VendorExecutor(StreamExecutor):
    """A step model on the vendor's device.

    Args:
        model: the model; its tensors are on the device.
        device: the device; the model's own by default.
        max_num_reqs: most rows of a launch that replays; the model's own by default.
        faults, check: as kpolicy's own executors have them; the contract suite doesn't need them.

    Raises:
        ConfigError: there is no such device.
    """

    def __init__(
        self,
        model: Any,
        *,
        device: Any = None,
        max_num_reqs: int | None = None,
        faults: Iterable[str] = (),
        check: bool = False,
    ) -> None:
        # Inside: who lists executors doesn't load the vendor's library.
        from kpolicy_vendor import stand_in

        at = torch.device(device or getattr(model, "device", "cpu"))
        adapter = StreamAdapter(
            "vendor",
            stand_in,
            at,
            begin=begin,
            classify=meaning,
            report=prove(stand_in, at),
            check=check,
            statics=getattr(model, "static_tensors", None),
            faults=faults,
        )
        super().__init__(model, adapter, max_num_reqs=max_num_reqs)


def begin(handle: Any) -> Any:
    """A graph that records on the current stream, in the pool of that handle.

    Not `torch.vendor.graph(...)`: a context manager that synchronises and empties caches is too slow for each segment
    of a PIECEWISE graph.
    """
    from kpolicy_vendor import stand_in

    graph = stand_in.VendorGraph()
    graph.capture_begin(pool=handle)
    return graph


def meaning(error: BaseException) -> Failure:
    """What an error costs: a capture or a replay (it is run another way), or the device (True: everything stops)."""
    meant = known(error)
    if meant is not None:
        return meant
    words = str(error).lower()
    if "out of memory" in words:
        return Failure(Reason.CAPTURE_OUT_OF_MEMORY, False)
    lost = "device lost" in words
    return Failure(Reason.DEVICE_LOST if lost else Reason.CAPTURE_FAILED, lost)


def prove(vendor: Any, device: torch.device) -> ProbeReport:
    """That the device is there, by the vendor's own count: what `torch.cuda` says of a disguised device proves nothing.

    Raises:
        ConfigError: it isn't there.
    """
    count = vendor.device_count()
    if not count or (device.index or 0) >= count:
        raise ConfigError(f"device {str(device)!r} isn't there: the vendor's library counts {count}.")
    words = f"{count} x {vendor.get_device_name(device)}; unverified on hardware"
    return ProbeReport("vendor", ProbeStatus.USABLE, words, facts={"devices": count})
