"""Reading golden decision tables of replicas: a section is a policy in a deployment, a row is a batch and its decision.

    [sglang:prefill=full] reqs=512 tokens=8192 k=0 loras=0 attention=mixed ladder=1,2,4
    d5 + p64@512 lora=1 forbid=full fact=value  =>  F 8/8 lora graph_fits

``d5`` is five decodes of one token, ``d5x4`` of four; ``p64@512`` a chunk of 64 tokens behind 512, ``p64*3`` three of
them. A decision is F tokens/requests, P tokens or E, then the variant or LoRA case if any, and the reason.
"""

from __future__ import annotations

import re
from pathlib import Path

from kpolicy.attention import Claims, HostParams
from kpolicy.costs import H200, LLAMA_8B, analytic_costs
from kpolicy.decision import Decision
from kpolicy.ladders import CaptureLadder, CaptureSizes
from kpolicy.modes import Mode
from kpolicy.policies import get_policy
from kpolicy.policies.base import Policy, PolicyContext
from kpolicy.reasons import Reason
from kpolicy.settings import Settings
from kpolicy.shapes import BatchShape

GOLDEN = Path(__file__).parent.parent / "golden"
COSTS = analytic_costs(LLAMA_8B, H200)
ATTENTION = {
    "none": Claims.at_level("none"),
    "single": Claims.at_level("single"),
    "uniform": Claims.at_level("uniform"),
    "mixed": Claims.at_level("mixed"),
    "frozen": Claims.at_level("mixed", host_params=HostParams.FROZEN),
    "unsplit": Claims.at_level("none", piecewise=False),
}


def context_of(policy: Policy, settings: Settings, claims: Claims, sizes: CaptureSizes | None = None) -> PolicyContext:
    """Everything the policy plans, captured."""
    planned = policy.plan(sizes or policy.sizes(settings), claims, settings)
    return PolicyContext(claims=claims, ladder=CaptureLadder(planned), costs=COSTS, settings=settings)


def rows(name: str) -> list[tuple[str, str, str]]:
    """(section, batch, decision) for each row of a golden table."""
    found, section = [], ""
    for raw in (GOLDEN / f"{name}.txt").read_text().splitlines():
        line = raw.split("#")[0].strip()
        if line.startswith("["):
            section = line
        elif line:
            batch, _, decision = line.partition("=>")
            found.append((section, batch.strip(), " ".join(decision.split())))
    return found


def section_context(section: str) -> tuple[Policy, PolicyContext]:
    """The policy and the context that a section header describes."""
    spec, _, rest = section[1:].partition("]")
    options = dict(part.split("=") for part in rest.split())
    policy = get_policy(spec)
    settings = Settings(
        max_num_reqs=int(options.pop("reqs")),
        max_num_tokens=int(options.pop("tokens")),
        num_speculative_tokens=int(options.pop("k", 0)),
        max_loras=int(options.pop("loras", 0)),
    )
    claims = ATTENTION[options.pop("attention", "mixed")]
    ladder = options.pop("ladder", "")
    sizes = CaptureSizes.of([int(size) for size in ladder.split(",")], settings) if ladder else None
    assert not options, f"unknown in {section}: {options}"
    return policy, context_of(policy, settings, claims, sizes)


def parse_batch(text: str) -> BatchShape:
    """The batch that a row describes."""
    decodes, prefills, facts, loras, forbidden = [], [], {}, 0, []
    for part in text.replace("+", " ").split():
        if match := re.fullmatch(r"d(\d+)(?:x(\d+))?", part):
            decodes.append((int(match[2] or 1), int(match[1])))
        elif match := re.fullmatch(r"p(\d+)(?:@(\d+))?(?:\*(\d+))?", part):
            prefills += [(int(match[1]), int(match[2] or 0))] * int(match[3] or 1)
        else:
            name, _, value = part.partition("=")
            if name == "lora":
                loras = int(value)
            elif name == "forbid":
                forbidden.append(Mode(value))
            else:
                facts[name] = int(value)
    return BatchShape(decodes=decodes, prefills=prefills, num_active_loras=loras, forbidden=forbidden, facts=facts)


def show(decision: Decision) -> str:
    """The decision as a row has it."""
    if decision.mode is Mode.EAGER:
        return f"E {decision.reason}"
    (launch,) = decision.launches
    key = launch.key
    assert key is not None
    assert key.part.value == decision.mode.value
    size = f"F {key.num_tokens}/{key.num_reqs}" if decision.mode is Mode.FULL else f"P {key.num_tokens}"
    return " ".join(filter(None, [size, key.variant, "lora" if key.lora_case else "", str(decision.reason)]))


def check_golden(section: str, batch: str, wanted: str) -> None:
    """The readable path and the prepared one give the row's decision."""
    policy, context = section_context(section)
    shape = parse_batch(batch)
    assert show(policy.decide(shape, context)) == wanted
    assert show(policy.compile(context).select(*shape.numbers)) == wanted


def agreed(policy: Policy, context: PolicyContext, *batches: str) -> list[str]:
    """What each of the ranks with these batches runs; an empty text is an idle rank."""
    compiled = policy.compile(context)
    numbers = [parse_batch(batch).numbers for batch in batches]
    reduced = [max(column) for column in zip(*(compiled.vote(each) for each in numbers), strict=True)]
    return [show(compiled.agree(reduced, each)) for each in numbers]


def check_properties(policy: Policy, context: PolicyContext, shape: BatchShape) -> None:
    """What holds for any batch: decided, as `select` decides, by a captured graph of enough tokens and rows."""
    decision = policy.decide(shape, context)
    assert policy.compile(context).select(*shape.numbers) == decision
    numbers = shape.numbers
    for key in decision.keys:
        assert key in context.ladder.keys
        assert key.num_tokens >= numbers.total_tokens
        assert key.num_reqs is None or key.num_reqs >= numbers.total_reqs
        assert key.lora_case >= numbers.num_active_loras
    if decision.mode is Mode.EAGER:
        assert decision.reason is not Reason.GRAPH_FITS


def waste(sizes: tuple[int, ...]) -> list[float]:
    """Padding of each size up to the largest, as a share of its tokens."""
    padded = [min(size for size in sizes if size >= n) for n in range(1, sizes[-1] + 1)]
    return [size / n - 1 for n, size in enumerate(padded, 1)]
