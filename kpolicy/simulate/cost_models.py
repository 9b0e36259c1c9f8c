"""Where a simulation's costs come from: a measured profile, a config on a named device, or measured kernel tables."""

from __future__ import annotations

import re
from pathlib import Path

import attrs

from kpolicy.costs import LLAMA_8B, CostTable, ModelFigures, analytic_costs
from kpolicy.errors import ConfigError, KPolicyError, ProfileError
from kpolicy.figures import find_device, kv_room, model_figures
from kpolicy.kv_span import NOT_RECORDED
from kpolicy.profiles import load_profile
from kpolicy.schemas import Profile

__all__ = ["CostModel", "check_model", "cost_model"]

_CALIBRATED = re.compile(r"(\w+) of ([0-9.]+) M parameters")
"""How a calibration names its model."""
_BILLIONS = re.compile(r"(?<![\d.x])(\d+(?:\.\d+)?)B\b", re.IGNORECASE)
"""How a model's name says its size."""
_NAMES_ALIKE = 2.0
"""Parameters by a name may differ by this factor: names round, and some count what a step doesn't read."""
_ALIKE = 0.35
"""Parameters may differ by this share: figures leave out the embedding table, which a small model mostly is."""


@attrs.frozen(kw_only=True)
class CostModel:
    """Costs, and what else is known of the model and the device.

    Args:
        costs: the table.
        what: where it comes from, in words.
        kv_bytes_per_token: bytes of KV a token; None where the model isn't known.
        kv_tokens: KV tokens that one device has room for beside the weights; None where that isn't known.
        notes: what the reader should know about the table.
        doubts: those of the notes that say what can't be told: whether a profile is of the config's model, and bytes of
            KV a token.
    """

    costs: CostTable
    what: str
    kv_bytes_per_token: int | None = None
    kv_tokens: int | None = None
    notes: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


def cost_model(
    *, profile: Path | None = None, config: Path | None = None, device: str | None = None, tables: str | None = None
) -> CostModel:
    """The cost model that was asked for; an 8B model on an H200 where nothing was.

    Args:
        profile: a measured profile, or the name of one that ships with kpolicy.
        config: a model's folder or ``config.json``.
        device: a name of `kpolicy.figures.DEVICES`.
        tables: ``aiconfigurator`` for measured kernel tables, or one of its engines, as ``aiconfigurator:sglang``.

    Raises:
        ConfigError: the choices contradict each other, a file can't be used, or the profile is of another model.
    """
    if profile is not None:
        if device is not None or tables is not None:
            raise ConfigError(
                f"--profile {profile} was measured on a device, so --device and --tables can't be given with it."
            )
        return _of_profile(profile, config)
    if tables is not None:
        return _of_tables(tables, config, device or "H200")
    named, figures = find_device(device or "H200"), LLAMA_8B if config is None else model_figures(config)
    return CostModel(
        costs=analytic_costs(figures, named.figures),
        what=f"analytic costs of {_an(figures.name)} on {named.figures.name}",
        kv_bytes_per_token=figures.kv_bytes_per_token or None,
        kv_tokens=_room(figures, device or "H200") if config is not None else None,
        notes=(
            f"nothing was measured, and these figures are unverified: {named.source}; host costs as on an H200",
            *figures.notes,
        ),
    )


def _of_profile(path: Path, config: Path | None) -> CostModel:
    profile = load_profile(path)
    costs = profile.costs
    figures = None if config is None else _known(config)
    unsure = None if config is None else check_model(path, profile, config)
    measured = "measured" if costs.measured else "of kernel tables" if costs.kernel_tables else "not measured"
    notes = [] if costs.measured else ["the profile says that its costs weren't measured"]
    if costs.kernel_tables:
        notes = [f"the profile says that its costs are of kernel tables: {costs.source}"]
    doubts = [unsure] if unsure else []
    notes += doubts
    if costs.kv_span is not None:
        notes.append(f"attention was timed at {costs.kv_span}")
    elif costs.measured:
        notes.append(f"{NOT_RECORDED}, so that steps of longer ones than attention was timed at can't be told")
    by_config = figures.kv_bytes_per_token if figures is not None else None
    by_profile = profile.kv_bytes_per_token
    if by_config is None and by_profile is None:
        doubts.append(f"{path} doesn't say bytes of KV a token, so graphs take no KV; {_telling(config)}")
        notes.append(doubts[-1])
    elif by_config and by_profile not in (None, by_config):
        notes.append(
            f"a token takes {by_profile:,} bytes of KV by the profile and {by_config:,} by --config, whose count is "
            "taken"
        )
    return CostModel(
        costs=costs,
        what=f"profile of {profile.model or 'a model without a name'} on {profile.device}, {measured}",
        kv_bytes_per_token=(by_profile if by_config is None else by_config) or None,
        notes=tuple(notes),
        doubts=tuple(doubts),
    )


def _telling(config: Path | None) -> str:
    """What would tell bytes of KV a token."""
    if config is None:
        return "--config tells, and so does a profile of kpolicy calibrate"
    return "of this --config they can't be counted, and a profile of kpolicy calibrate says them"


def _known(config: Path) -> ModelFigures | None:
    try:
        return model_figures(config)
    except KPolicyError:
        return None


def check_model(path: Path, profile: Profile, config: Path) -> str | None:
    """Refuse a profile that says it is of another model than the config's; a note where that can't be told.

    Raises:
        ProfileError: it is of another model.
    """
    from kpolicy.attention.fields import read_config

    figures = _known(config)
    said = _CALIBRATED.match(profile.model)
    if said is None or figures is None:
        return _check_name(path, profile, config, figures)
    classes = read_config(config).get("architectures") or []
    params = float(said.group(2)) * 1e6
    apart = abs(params - figures.weight_params) > _ALIKE * max(params, figures.weight_params)
    if apart or (classes and said.group(1) not in classes):
        raise ProfileError(
            f"{path} was measured with {profile.model}, and {config} is {', '.join(classes) or figures.name} with "
            f"{figures.weight_params / 1e6:.1f} M parameters. Give the profile of that model, or leave one out."
        )
    return None


def _check_name(path: Path, profile: Profile, config: Path, figures: ModelFigures | None) -> str | None:
    """The same where the profile has a model's name or path, as serving engines' plugins write it.

    And where the config's weights aren't laid out here, without `figures`.
    """
    folder = config if config.is_dir() else config.parent
    if not profile.model or Path(profile.model).name == folder.resolve().name:
        return None
    billions = _BILLIONS.search(Path(profile.model).name)
    if billions is not None and figures is not None:
        params = float(billions.group(1)) * 1e9
        if not 1 / _NAMES_ALIKE < params / figures.weight_params < _NAMES_ALIKE:
            raise ProfileError(
                f"{path} was measured with {profile.model}, and {config} has {figures.weight_params / 1e6:.1f} M "
                "parameters. Give the profile of that model, or leave one out."
            )
    return f"the profile is of {profile.model} by its own word; whether that is {config}'s model can't be told"


def _of_tables(tables: str, config: Path | None, device: str) -> CostModel:
    from kpolicy.simulate.aiconfigurator import aiconfigurator_costs

    name, _, backend = tables.partition(":")
    if name != "aiconfigurator":
        raise ConfigError(f"--tables is {tables!r}; it is aiconfigurator, or aiconfigurator:BACKEND such as :sglang.")
    if config is None:
        raise ConfigError("--tables needs --config: the model's config.json says which operators a step has.")
    costs, fit = aiconfigurator_costs(config, device, backend=backend or "vllm")
    figures = model_figures(config)
    return CostModel(
        costs=costs,
        what=f"{fit.package}'s tables for {figures.name} on {find_device(device).figures.name.split(' (')[0]}",
        kv_bytes_per_token=figures.kv_bytes_per_token or None,
        kv_tokens=_room(figures, device),
        notes=(
            f"kernels measured by the tables' publisher ({fit.measured_share:.0%} of the dense time at 64 tokens, the "
            f"rest by its formulas), attention fitted with a median error of {fit.decode_error:.0%} for decodes and "
            f"{fit.prefill_error:.0%} for prompts, over {costs.kv_span}; host and capture costs aren't measured",
        ),
    )


def _room(figures: ModelFigures, device: str) -> int | None:
    return kv_room(figures, find_device(device)) if figures.kv_bytes_per_token else None


def _an(name: str) -> str:
    return f"an {name}" if name[:1] in "aeiou8" else f"a {name}"
