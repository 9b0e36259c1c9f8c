"""One adapter for each vLLM that is known: where its parts are, and whether they are as they were recorded."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import attrs

from kpolicy.errors import KPolicyError
from kpolicy_vllm.versions.signatures import differing

__all__ = ["KNOWN", "KUNLUN", "Adapter", "UnsupportedError", "adapter"]

KNOWN = {"0.23.0": "kpolicy_vllm.versions.v0_23", "0.33.0": "kpolicy_vllm.versions.v0_33"}
"""The releases with an adapter, and its module."""
KUNLUN = {"0.15.1": "kpolicy_vllm.versions.v0_15", "0.25.1": "kpolicy_vllm.versions.v0_25"}
"""Further ones under vLLM-Kunlun, which is made for them."""


class UnsupportedError(KPolicyError):
    """This vLLM isn't one that kpolicy knows."""


@attrs.frozen
class Adapter:
    """What differs between releases.

    Args:
        version: the release.
        config_class: vLLM's `VllmConfig`.
        worker_wrapper_class: vLLM's `WorkerWrapperBase`.
        attach: ``attach(runner, state)`` gives a runner of either kind kpolicy's decisions.
        signatures: the recorded parameters that kpolicy relies on, by ``module:name``: of the configuration, of what
            `attach` changes in each runner, and of what SPLIT, bounded steps and late ones need besides.
    """

    version: str
    config_class: type[Any]
    worker_wrapper_class: type[Any]
    attach: Callable[[Any, Any], None]
    signatures: dict[str, dict[str, tuple[str, ...]]]

    def check(self, part: str) -> None:
        """Hold vLLM's live signatures to the recorded ones.

        Args:
            part: ``config``, ``v1``, ``v2``, ``scheduler``, ``ranks``, ``engine`` or ``two forwards``.

        Raises:
            UnsupportedError: one differs, or there is no record for this release.
        """
        if part not in self.signatures:
            raise UnsupportedError(f"there is no record of vLLM {self.version}'s {part}.")
        for name, recorded, live in differing(self.signatures[part]):
            raise UnsupportedError(
                f"{name} of vLLM {self.version} has ({live}), and kpolicy knows it with ({', '.join(recorded)}). "
                "This vLLM was changed; use the released wheel, or a kpolicy-vllm made for it."
            )


def adapter() -> Adapter:
    """The adapter of the vLLM that is installed.

    Raises:
        UnsupportedError: there is none for it, or its configuration isn't as recorded.
    """
    version = str(import_module("vllm").__version__).partition("+")[0]
    known = KNOWN if find_spec("vllm_kunlun") is None else KNOWN | KUNLUN
    if version not in known:
        raise UnsupportedError(
            f"this is vLLM {version}, and kpolicy-vllm knows {' and '.join(known)}. Install one of them, or a "
            "kpolicy-vllm made for this one."
        )
    made: Adapter = import_module(known[version]).make()
    made.check("config")
    return made
