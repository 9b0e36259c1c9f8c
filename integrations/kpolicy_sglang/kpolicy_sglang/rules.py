"""SGLang's rules that are known by their text: where a batch surely has their yes, they aren't asked.

SGLang's rule of a step reads some twenty attributes, most of them of what a deployment doesn't have, and nearly always
says yes. What it reads of the runner is set as the runner is made. So where the rule's text is one that is known here,
and the runner is of the usual kind, its yes goes by a few attributes of the batch, and `kpolicy_sglang.dispatch` looks
at those alone. A batch with anything else has SGLang asked: what is told here is always its yes, and never a no.

Another text, of another release, a patch or someone else's hook, isn't known, and is asked each time. So is a runner of
ranks that vote, with adapters on 0.5.23's prompts, two-batch overlap, multiplexing, encoders or n-gram drafts. Whether
a runner is still as it was is looked at while it serves, see `kpolicy_sglang.bound`.
"""

from __future__ import annotations

import hashlib
import inspect
import linecache
from collections.abc import Callable, Mapping
from functools import partial
from textwrap import dedent
from tokenize import TokenError
from typing import Any

import attrs

__all__ = ["Rule", "known_rule"]

_OFF_FOR_DECODES = (
    "ragged_verify_mode", "require_mlp_tp_gather", "require_mlp_sync", "disable_padding", "enable_pdmux",
    "is_encoder_decoder", "enable_two_batch_overlap",
)  # fmt: skip
_BREAKABLE = {"prefill_backend_name": "breakable"}
_ABSENT = object()
Around = Callable[[Any, str], Callable[..., Any] | None]


@attrs.frozen
class Rule:
    """A rule, by its text, and the runners of which its yes is known.

    Args:
        texts: SHA-256 of each method that decides, by name.
        off: attributes of the runner that have to be false.
        seldom: the same of those that not every runner has.
        none: attributes that have to be None.
        equal: attributes that have to be just that.
    """

    texts: Mapping[str, str]
    off: tuple[str, ...]
    seldom: tuple[str, ...] = ()
    none: tuple[str, ...] = ()
    equal: Mapping[str, str] = {}

    def is_usual(self, runner: Any, sizes: tuple[int, ...]) -> bool:
        """Whether a runner is of the usual kind, with graphs of these sizes."""
        of_runner = partial(getattr, runner)
        return (
            not any(of_runner(name, True) for name in self.off)
            and not any(of_runner(name, False) for name in self.seldom)
            and all(of_runner(name, _ABSENT) is None for name in self.none)
            and all(of_runner(name, _ABSENT) == value for name, value in self.equal.items())
            and _captured(runner, sizes)
            and not _drafts_by_ngram(runner)
        )


_KNOWN = (
    # 0.5.16's and 0.5.23's decodes.
    Rule({"can_run_graph": "c822c97afc00bb77a95d82ffc35f605ba5104957b9a1f0240fe1b390221cda48"}, _OFF_FOR_DECODES),
    Rule({"can_run_graph": "8121b665ac8fa0588e826ac3fc2af30b808a4966302628a09cf1f28bf9b8e197"}, _OFF_FOR_DECODES),
    # 0.5.16's prompts.
    Rule(
        {
            "can_run_graph": "602c8bb250797ec09597df4afec6349a10e04d3db59c3fbe2a16be1ace2ec924",
            "_has_unsupported_mha_prefix": "8ea2703870521f14f930a243fe0c34cb52288e27547d27b8a6a176c724597952",
            "_has_inactive_dp_rank": "58611434a6f9aa55d52be982bcf173b3439d0ad7082133c9d8cea638f7b73ddf",
            "_uses_eager_prefill_tail": "47f4d61555401954d70f2c47dc9144ce223af37b83168c8cc8413e9835673ee7",
            "_pad_to_bucket": "9d59b73b3d7aa2d3f7ef555a4fd358a04deb7e5f93da120b592f810f33dbf7a8",
        },
        ("_is_full_backend", "has_mha_companion_layers"),
        equal=_BREAKABLE,
    ),
    # 0.5.23's.
    Rule(
        {
            "can_run_graph": "eb54943fb4e63a3ef8fef92d19fc404bbe1d59d73810dffce16e2f2df25be92e",
            "can_replay_locally": "4f77dd57f3d41daf38f84e47dbd42ffeefbaa19bc7e78b203995317748722082",
            "_has_inactive_dp_rank": "d9e02f79179f1032ddc9efdb95319ab2b14a59dcad3295f644c7c524d4f9eeab",
            "_has_uncapturable_chunked_prefix": "99727921a32ff22ec3e294caecf57cb9678fbb52a65e306c9b25acb059e274bd",
            "_uses_eager_prefill_tail": "47f4d61555401954d70f2c47dc9144ce223af37b83168c8cc8413e9835673ee7",
            "_pad_to_bucket": "9d59b73b3d7aa2d3f7ef555a4fd358a04deb7e5f93da120b592f810f33dbf7a8",
        },
        (
            "_is_full_backend", "has_mha_companion_layers", "_qwen_bcg_hc_sidechannel", "_qwen_bcg_mtp_draft",
            "_capture_chunked_prefix", "enable_lora",
        ),
        seldom=("enable_cp_bcg_capture", "prefer_eager_mixed_prefill"),
        none=(
            "_captured_attn_metadata_max_bs", "max_context_size", "max_seq_len", "_backend_can_run_prefill_cuda_graph",
        ),
        equal=_BREAKABLE,
    ),
)  # fmt: skip


def known_rule(
    runner: Any, own: Callable[..., Any], sizes: tuple[int, ...], around: Around
) -> Callable[[Any], bool] | None:
    """Whether a runner goes by a rule that is known and is of the usual kind; None where it doesn't, or isn't.

    Args:
        runner: SGLang's.
        own: its own `can_run_graph`, without kpolicy's hook.
        sizes: that it captured, rising.
        around: of a runner and a method's name what kpolicy's hook on it is around; None where there is no such hook.

    Returns:
        What tells of the runner later whether it is as it was; it doesn't hold the runner.
    """
    text = _digest(own)
    for rule in _KNOWN:
        if rule.texts["can_run_graph"] != text or not rule.is_usual(runner, sizes):
            continue
        found = {name: _method(runner, name, around) for name in rule.texts if name != "can_run_graph"}
        if any(_digest(method) != rule.texts[name] for name, method in found.items()):
            continue

        def holds(now: Any, rule: Rule = rule, found: Mapping[str, Any] = found) -> bool:
            same = all(_method(now, name, around) is method for name, method in found.items())
            return same and rule.is_usual(now, sizes)

        return holds
    return None


def _captured(runner: Any, sizes: tuple[int, ...]) -> bool:
    """Whether a runner of prompts has just these sizes, or one of decodes none larger."""
    tokens = getattr(runner, "capture_num_tokens", None)
    return tuple(tokens) == sizes if tokens else getattr(runner, "max_bs", 0) == sizes[-1]


def _drafts_by_ngram(runner: Any) -> bool:
    algorithm = getattr(getattr(runner, "model_runner", None), "spec_algorithm", None)
    return algorithm is not None and bool(algorithm.is_ngram())


def _method(runner: Any, name: str, around: Around) -> Any:
    """The function that a runner has for a method: its own, or its class's, without kpolicy's hook."""
    own = getattr(runner, "__dict__", {}).get(name)
    if own is not None:
        return getattr(own, "__func__", own)
    return around(runner, name) or getattr(type(runner), name, None)


def _digest(function: Any) -> str:
    """SHA-256 of a function's text; empty where it can't be had."""
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    lines = linecache.getlines(code.co_filename)
    if not lines:
        return ""
    try:
        text = "".join(inspect.getblock(lines[code.co_firstlineno - 1 :]))
    except (SyntaxError, TokenError):
        return ""
    return hashlib.sha256(dedent(text).rstrip().encode()).hexdigest()
