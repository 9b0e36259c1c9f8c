"""`kpolicy decide` and `kpolicy explain`: one batch from flags."""

from __future__ import annotations

from typing import Annotated

import attrs
from cyclopts import Parameter

from kpolicy.cli.options import Deployment, Json, at_least, ladder_of, pairs, settings_of, whole
from kpolicy.cli.render import print_json, render_explanation
from kpolicy.engine import Engine
from kpolicy.errors import ConfigError, UnknownNameError
from kpolicy.modes import Mode, parse_mode
from kpolicy.settings import Settings
from kpolicy.shapes import BatchShape
from kpolicy.words import some

__all__ = ["decide", "explain"]

DEFAULT_KV_TOKENS = 1024
_OF_BATCH = "Batch"


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class Asked:
    """The batch, and what decides about it."""

    decodes: Annotated[
        str | None,
        Parameter(
            group=_OF_BATCH, help="Decode rows: a count, or COUNTxLENGTH runs joined by commas, such as 32 or 30x4,2x2."
        ),
    ] = None
    prefill: Annotated[
        str | None,
        Parameter(
            group=_OF_BATCH,
            help="Prompt chunks of this step: new tokens, with @CONTEXT for tokens already in KV, such as 512,64@1000.",
        ),
    ] = None
    kv_tokens: Annotated[
        int | None,
        Parameter(
            group=_OF_BATCH,
            converter=whole,
            help="KV tokens that all decode rows attend to together. By default 1,024 a row, and this step's.",
        ),
    ] = None
    loras: Annotated[
        int, Parameter(group=_OF_BATCH, converter=whole, help="LoRA adapters active in the batch; see --max-loras.")
    ] = 0
    steps_ahead: Annotated[
        int,
        Parameter(group=_OF_BATCH, converter=whole, help="Decode steps that may follow each other without the host."),
    ] = 1
    forbid: Annotated[
        str | None, Parameter(group=_OF_BATCH, help="Modes that this step may not use, such as full,split.")
    ] = None
    policy: Annotated[
        str, Parameter(help="A policy, with arguments after a colon, such as vllm:runner=v2,version=0.33.")
    ] = "auto"
    max_num_tokens: Annotated[int, Parameter(group="Deployment", converter=whole, help="Most tokens in one step.")] = (
        8192
    )
    speculative: Annotated[
        int, Parameter(group="Deployment", converter=whole, help="Draft tokens verified a decode row.")
    ] = 0
    max_loras: Annotated[
        int, Parameter(group="Deployment", converter=whole, help="Most LoRA adapters active in one step.")
    ] = 0
    strict: Annotated[
        bool,
        Parameter(negative="", show_default=False, help="A downgrade that attention forces on the policy is an error."),
    ] = False


def decide(*, asked: Asked = Asked(), deployment: Deployment = Deployment(), json: Json = False) -> None:  # noqa: B008
    """Say how one batch would run, and why."""
    engine, shape = _engine(asked, deployment), _shape(asked, deployment)
    decision = engine.decide(shape)
    if json:
        print_json(
            {
                "shape": str(shape),
                "policy": asked.policy,
                **decision.as_dict(shape.numbers),
                "downgrades": [str(downgrade) for downgrade in engine.downgrades],
            }
        )
        return
    print(f"{decision.label} for {shape}, by {asked.policy}")
    for launch in decision.launches:
        padding = launch.padding(shape.numbers)
        print(f"  {launch}" + (f", {some(padding, 'padding token')}" if padding else ""))
    print(f"because {decision.why}")
    for downgrade in engine.downgrades:
        print(f"downgraded at start-up: {downgrade}")


def explain(*, asked: Asked = Asked(), deployment: Deployment = Deployment(), json: Json = False) -> None:  # noqa: B008
    """Show every way to run one batch, what each would cost, and why it lost."""
    engine, shape = _engine(asked, deployment), _shape(asked, deployment)
    explanation = attrs.evolve(engine.explain(shape), policy=asked.policy)
    if json:
        print_json({**explanation.as_dict(), "downgrades": [str(downgrade) for downgrade in engine.downgrades]})
        return
    render_explanation(explanation, engine.downgrades)


def _settings(asked: Asked, deployment: Deployment) -> Settings:
    return settings_of(
        max_num_reqs=deployment.most_reqs(),
        max_num_tokens=("--max-num-tokens", asked.max_num_tokens),
        num_speculative_tokens=("--speculative", asked.speculative),
        max_loras=("--max-loras", asked.max_loras),
    )


def _engine(asked: Asked, deployment: Deployment) -> Engine:
    if asked.decodes is None and asked.prefill is None:
        raise ConfigError("there is no batch; give --decodes, --prefill or both: --decodes 32 --prefill 512,64.")
    settings = _settings(asked, deployment)
    return Engine(
        asked.policy,
        attention=deployment.support(),
        ladder=ladder_of(deployment.ladder, settings, config=deployment.config),
        settings=settings,
        costs=deployment.costs(),
        objective=deployment.objective,
        budget=deployment.budget(),
        strict=asked.strict,
    )


def _shape(asked: Asked, deployment: Deployment) -> BatchShape:
    settings = _settings(asked, deployment)
    runs = pairs(
        "--decodes", asked.decodes, mark="x", default=settings.query_len, least=(1, 1),
        example="counts of rows, or COUNTxLENGTH such as 30x4",
    )  # fmt: skip
    chunks = pairs(
        "--prefill", asked.prefill, mark="@", default=0, least=(1, 0),
        example="new tokens, or NEW@CONTEXT such as 64@1000",
    )  # fmt: skip
    rows = sum(count for count, _ in runs)
    tokens = sum(count * length for count, length in runs)
    num_reqs, num_tokens = rows + len(chunks), tokens + sum(new for new, _ in chunks)
    if num_reqs > settings.max_num_reqs or num_tokens > settings.max_num_tokens:
        raise ConfigError(
            f"the batch has {some(num_reqs, 'request')} and {some(num_tokens, 'token')}; the deployment allows "
            f"{settings.max_num_reqs:,} and {settings.max_num_tokens:,}. Raise --max-num-reqs or --max-num-tokens."
        )
    if at_least("--loras", asked.loras, 0) > settings.max_loras:
        raise ConfigError(f"--loras is {asked.loras}, and --max-loras {settings.max_loras}; raise --max-loras.")
    return BatchShape(
        decodes=[(length, count) for count, length in runs],
        prefills=chunks,
        decode_kv_tokens=_kv_tokens(asked.kv_tokens, rows, tokens),
        num_active_loras=asked.loras,
        max_decode_steps=at_least("--steps-ahead", asked.steps_ahead, 1),
        forbidden=_forbidden(asked.forbid),
    )


def _kv_tokens(given: int | None, rows: int, tokens: int) -> int | None:
    if given is None:
        return rows * DEFAULT_KV_TOKENS + tokens if rows else None
    if not rows:
        raise ConfigError(
            f"--kv-tokens is {given}, and there are no decode rows; add --decodes. A prompt chunk's KV is its @CONTEXT."
        )
    if given < tokens:
        raise ConfigError(
            f"--kv-tokens is {given} for {some(tokens, 'decode token')}; each attends to itself at least, so give "
            f"{tokens} or more, counting this step's tokens in."
        )
    return at_least("--kv-tokens", given, 0)


def _forbidden(text: str | None) -> list[Mode]:
    try:
        return [] if text is None else [parse_mode(name) for name in text.split(",")]
    except UnknownNameError as error:
        raise ConfigError(f"--forbid takes modes joined by commas: {error}") from None
