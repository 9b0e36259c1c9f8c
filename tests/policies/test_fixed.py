"""The fixed policies against a table worked out by hand, and their downgrades."""

import re
from pathlib import Path

import pytest

from kpolicy.attention.support import Claims, HostParams
from kpolicy.costs import analytic_costs
from kpolicy.errors import LadderError, NoLegalModeError
from kpolicy.ladders import CaptureLadder, CaptureSizes
from kpolicy.modes import Mode, Part, SplitForm
from kpolicy.policies import PolicyContext, get_policy
from kpolicy.reasons import Reason
from kpolicy.settings import Settings
from kpolicy.shapes import BatchShape

GOLDEN = Path(__file__).parent.parent / "golden" / "own_policies.txt"
SIZES = CaptureSizes((1, 2, 4, 8), (4, 16), (8, 16, 32))
SETTINGS = Settings(max_num_reqs=8)


def golden_rows():
    """(attention, batch, policy, expected) of the table."""
    lines = GOLDEN.read_text().splitlines()
    names = next(line for line in lines if "| batch" in line).lstrip("# ").split("|")[2:]
    for line in lines:
        if line and not line.startswith("#"):
            attention, batch, *cells = (cell.strip() for cell in line.split("|"))
            for name, cell in zip(names, cells, strict=True):
                yield attention, batch, name.strip(), cell


def shape_of(text):
    decodes, prefills = [], []
    for word in text.split():
        if match := re.fullmatch(r"(\d+)d(?:x(\d+))?", word):
            decodes.append((int(match[2] or 1), int(match[1])))
        else:
            prefills.append((int(word.removesuffix("p")), 0))
    return BatchShape(decodes=decodes, prefills=prefills)


def context_for(policy, attention):
    claims = Claims.at_level(attention)
    keys = policy.plan(SIZES, claims, SETTINGS)
    return PolicyContext(claims=claims, ladder=CaptureLadder(keys), costs=analytic_costs(), settings=SETTINGS)


def describe(decision):
    """A decision in the table's words."""
    parts = []
    for launch in decision.launches:
        if launch.key is None:
            parts.append("E")
        elif launch.key.part is Part.PIECEWISE:
            parts.append(f"P {launch.key.num_tokens}")
        else:
            parts.append(f"{'F' if launch.key.decode_only else 'M'} {launch.key.num_tokens}/{launch.key.num_reqs}")
    words = [("S " if decision.mode is Mode.SPLIT else "") + "+".join(parts), decision.reason.value]
    words += [launch.reason.value for launch in decision.launches if launch.reason]
    return " ".join(words)


@pytest.mark.parametrize(("attention", "batch", "name", "expected"), list(golden_rows()))
def test_golden(attention, batch, name, expected):
    """Each cell of the hand-made table is what the policy decides, readably and prepared."""
    policy = get_policy(name)
    context, shape = context_for(policy, attention), shape_of(batch)
    assert describe(policy.decide(shape, context)) == expected
    assert describe(policy.compile(context).select(*shape.numbers)) == expected


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("eager", set()),
        ("full", {Part.FULL}),
        ("piecewise", {Part.PIECEWISE}),
        ("full_and_piecewise", {Part.FULL, Part.PIECEWISE}),
        ("split", {Part.FULL, Part.PIECEWISE}),
    ],
)
def test_policies_plan_only_what_they_replay(name, parts):
    """A policy plans graphs of its own parts, and split none for mixed batches, because it divides them."""
    policy = get_policy(name)
    keys = policy.plan(SIZES, Claims.at_level("mixed"), SETTINGS)
    assert {key.part for key in keys} == parts
    if name == "split":
        assert all(key.decode_only for key in keys if key.part is Part.FULL)


@pytest.mark.parametrize("form", list(SplitForm)[:2])
def test_split_form_is_what_was_asked(form):
    """The form given to split is the form of its decisions, on one stream or two."""
    policy = get_policy("split", form=form)
    decision = policy.decide(shape_of("2d 10p"), context_for(policy, "uniform"))
    assert decision.form is form
    assert [launch.stream for launch in decision.launches] == [0, int(form is SplitForm.BESIDE)]


@pytest.mark.parametrize(
    ("name", "claims", "k", "expected"),
    [
        ("full", Claims.at_level("mixed"), 0, []),
        (
            "full", Claims.at_level("uniform"), 0,
            [("batches with prefill", "full", "eager", Reason.SUPPORT_UNIFORM_ONLY)],
        ),
        (
            "full_and_piecewise", Claims.at_level("single"), 3,
            [
                ("decodes of 4 tokens", "full", "piecewise", Reason.SPECULATION_TOO_WIDE),
                ("batches with prefill", "full", "piecewise", Reason.SPECULATION_TOO_WIDE),
            ],
        ),
        (
            "full", Claims.at_level("mixed", host_params=HostParams.FROZEN), 0,
            [
                ("single-token decodes", "full", "eager", Reason.HOST_LENGTHS_FROZEN),
                ("batches with prefill", "full", "eager", Reason.HOST_LENGTHS_FROZEN),
            ],
        ),
        (
            "piecewise", Claims.at_level("mixed", piecewise=False), 0,
            [
                ("single-token decodes", "piecewise", "eager", Reason.NO_PIECEWISE),
                ("batches with prefill", "piecewise", "eager", Reason.NO_PIECEWISE),
            ],
        ),
        ("split", Claims.at_level("uniform"), 0, []),
        ("eager", Claims.at_level("none"), 3, []),
    ],
)  # fmt: skip
def test_downgrades_are_values_with_a_reason(name, claims, k, expected):
    """What attention takes back of a policy's promise is data: the batches, both modes and the reason."""
    found = get_policy(name).resolve(claims, Settings(num_speculative_tokens=k))
    assert [(each.batches, each.asked, each.resolved, each.reason) for each in found] == expected


def test_a_downgrade_never_raises_the_mode():
    """Whatever the claims, start-up resolution goes down the order full, piecewise, eager."""
    rank = {"full": 0, "split": 0, "piecewise": 1, "eager": 2}
    for name in ("full", "piecewise", "full_and_piecewise", "split", "auto"):
        for level in ("none", "single", "uniform", "varlen_decode", "mixed"):
            for piecewise in (True, False):
                for k in (0, 1):
                    claims = Claims.at_level(level, piecewise=piecewise)
                    for each in get_policy(name).resolve(claims, Settings(num_speculative_tokens=k)):
                        assert rank[each.resolved] >= rank[each.asked]


def test_nothing_left_is_an_error_that_says_what_was_forbidden():
    """A batch whose every mode is forbidden is an error naming them, not a silent choice."""
    policy = get_policy("full_and_piecewise")
    shape = BatchShape.decode(3, forbidden=list(Mode))
    with pytest.raises(NoLegalModeError, match="forbidden are full, piecewise, split, eager"):
        policy.decide(shape, context_for(policy, "mixed"))


def test_off_grid_sizes_are_refused_under_speculation():
    """Decode sizes that aren't multiples of 1 + k are an error with the rounded list."""
    with pytest.raises(LadderError, match=r"not a multiple of 4 .* Rounded up: 4,8"):
        get_policy("full").plan(CaptureSizes((4, 6)), Claims.at_level("uniform"), Settings(num_speculative_tokens=3))
