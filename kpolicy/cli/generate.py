"""`kpolicy generate`: text from a local checkpoint, through the same Engine and Batcher as `kpolicy run`."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import attrs
from cyclopts import Parameter

from kpolicy.cli.options import Json, at_least, device_here, settings_of, whole
from kpolicy.cli.render import print_json
from kpolicy.errors import ConfigError
from kpolicy.policies import get_policy

__all__ = ["generate"]


def generate(
    *,
    model: Annotated[Path, Parameter(help="The model's folder: config.json, safetensors and a tokenizer.")],
    prompt: Annotated[
        list[str], Parameter(negative="", help="A text to go on from; repeat the option for several, batched together.")
    ],
    max_tokens: Annotated[int, Parameter(converter=whole, help="Most tokens to generate for each prompt.")] = 64,
    temperature: Annotated[
        float, Parameter(help="How freely tokens are picked; 0 takes the likeliest each time.")
    ] = 0.0,
    seed: Annotated[int, Parameter(converter=whole, help="Picks tokens where the temperature isn't 0.")] = 0,
    policy: Annotated[str, Parameter(help="A policy, with arguments after a colon.")] = "auto",
    device: Annotated[
        str,
        Parameter(
            help="cpu, cuda (cuda:1 is the second one), ascend, kunlun, xpu or accelerator (what torch finds); auto "
            "takes the first that is there."
        ),
    ] = "cpu",
    kv_tokens: Annotated[int, Parameter(converter=whole, help="KV capacity in tokens, all prompts together.")] = 16_384,
    json: Json = False,
) -> int:
    """Generate text with a local checkpoint on this machine. The chat template isn't applied."""
    from kpolicy.cli.run import found, needs_torch
    from kpolicy.cli.run_model import size_on

    name = device_here(device)
    needs_torch("generate")
    get_policy(policy)
    at_least("--max-tokens", max_tokens, 1)
    at_least("--seed", seed, 0)
    at = found(name)
    size = size_on(at.kind)
    at_least("--kv-tokens", kv_tokens, size.block_size)
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"--temperature is {temperature:g}; it takes a number from 0 up, such as 0.8.")
    if not prompt:
        raise ConfigError("there is no --prompt; give at least one, such as --prompt 'Once upon a time'.")
    from kpolicy.serving import generate as text
    from kpolicy.serving.real_run import Serving, open_model, quiet_transformers, share_cores, small_ladder

    settings = settings_of(
        max_num_reqs=("the number of prompts", min(len(prompt), size.max_num_reqs)),
        max_num_tokens=("--max-num-tokens", size.max_num_tokens),
    )
    ladder = None
    if at.kind == "cpu":
        ladder = small_ladder(settings)
        share_cores()
    quiet_transformers()
    loaded = open_model(model, settings, kv_tokens=kv_tokens, block_size=size.block_size, seed=seed, device=at.given)
    text.encode(loaded, prompt, max_tokens)  # what is wrong with a prompt is said before anything is captured
    serving = Serving(model=loaded, settings=settings, ladder=ladder, verify=False, calibrate=1.0, device=at.executor)
    engine = serving.engine(policy)
    try:
        engine.capture()
        done, result = text.generate(
            engine, serving, prompt, max_tokens=max_tokens, temperature=temperature, seed=seed
        )  # fmt: skip
    finally:
        engine.release()
    if json:
        print_json({"completions": [attrs.asdict(each) for each in done], "run": result.as_dict()})
    else:
        for each in done:
            print(f"{each.prompt}{each.text}\n")
    if result.interrupted:
        sys.stderr.write(f"kpolicy: {result.interrupted}; what was done is above.\n")
        return 130 if result.interrupted.startswith("interrupted") else 1
    return 0
