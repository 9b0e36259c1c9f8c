"""vLLM's start-up: its downgrade tables, and what the policy does under the resolved mode."""

from pathlib import Path

import pytest

from kpolicy.attention.support import Claims, HostParams, SupportLevel
from kpolicy.errors import ConfigError, LadderError, SupportError
from kpolicy.ladders import CaptureSizes
from kpolicy.modes import Part
from kpolicy.policies import get_policy
from kpolicy.policies.vllm import vllm
from kpolicy.policies.vllm_resolve import VllmMode, resolve_mode, support_of, without_pieces
from kpolicy.policies.vllm_sizes import aligned, default_list, parse_drafts, tiers
from kpolicy.reasons import Reason
from kpolicy.settings import Settings

COLUMNS = {
    "ALWAYS": [(SupportLevel.MIXED, 1), (SupportLevel.MIXED, 4)],
    "UNIFORM_BATCH": [(level, q) for level in (SupportLevel.UNIFORM, SupportLevel.VARLEN_DECODE) for q in (1, 2, 9)],
    "SINGLE q=1": [(SupportLevel.SINGLE, 1)],
    "SINGLE q>1": [(SupportLevel.SINGLE, 2), (SupportLevel.SINGLE, 5)],
    "NEVER": [(SupportLevel.NONE, 1), (SupportLevel.NONE, 4)],
}


def golden_cells():
    """Every cell of the golden tables: split, configured mode, column, resolved mode."""
    split, header = True, []
    for line in (Path(__file__).parents[1] / "golden" / "vllm_resolve.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            split = line == "[split]"
            continue
        first, *rest = (cell.strip() for cell in line.split("|"))
        if first == "configured":
            header = rest
        else:
            yield from ((split, first, column, wanted) for column, wanted in zip(header, rest, strict=True))


@pytest.mark.parametrize(("split", "mode", "column", "wanted"), list(golden_cells()))
def test_golden(split, mode, column, wanted):
    """Each cell of vLLM's downgrade tables comes out, for every level and query length it stands for."""
    for level, query_len in COLUMNS[column]:
        if wanted == "RAISE":
            with pytest.raises(SupportError, match="Configure PIECEWISE"):
                resolve_mode(VllmMode(mode), level, query_len, split)
        else:
            assert resolve_mode(VllmMode(mode), level, query_len, split) is VllmMode(wanted)


def test_golden_is_whole():
    """The tables have a cell for every mode and column; PIECEWISE can't be asked for without a split."""
    assert len(list(golden_cells())) == len(COLUMNS) * (len(VllmMode) + len(VllmMode) - 1)


def test_downgrade_never_raises_decodes():
    """No downgrade gives decode batches more than was configured."""
    rank = {"eager": 0, "piecewise": 1, "full": 2}
    for mode in VllmMode:
        for level in SupportLevel:
            for query_len in (1, 3):
                if mode is VllmMode.FULL and level is SupportLevel.NONE:
                    continue
                for split in (True, False):
                    resolved = resolve_mode(mode, level, query_len, split)
                    assert rank[resolved.decode.value] <= rank[mode.decode.value]


@pytest.mark.parametrize(
    ("claims", "query_len", "level"),
    [
        (Claims.at_level("mixed"), 4, SupportLevel.MIXED),
        (Claims.at_level("uniform"), 4, SupportLevel.UNIFORM),
        (Claims.at_level("varlen_decode"), 4, SupportLevel.UNIFORM),
        (Claims.at_level("single"), 1, SupportLevel.SINGLE),
        (Claims.at_level("none"), 1, SupportLevel.NONE),
        (Claims(uniform_query_len=3), 3, SupportLevel.UNIFORM),
        (Claims(uniform_query_len=3), 4, SupportLevel.SINGLE),
        (Claims.at_level("mixed", host_params=HostParams.FROZEN), 1, SupportLevel.NONE),
    ],
)
def test_support_of(claims, query_len, level):
    """Claims stand for a level of vLLM's scale; a limit under 1 + k counts as single-token decodes only."""
    assert support_of(claims, query_len) is level


@pytest.mark.parametrize(
    ("version", "mode", "wanted"),
    [
        ("0.23", "FULL_AND_PIECEWISE", "NONE"),
        ("0.23", "PIECEWISE", "NONE"),
        ("0.33", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"),
        ("0.33", "PIECEWISE", "NONE"),
        ("0.33", "FULL", "FULL"),
        ("0.23", "FULL_DECODE_ONLY", "FULL_DECODE_ONLY"),
    ],
)
def test_without_pieces(version, mode, wanted):
    """Without compiled pieces 0.23 drops a mode that needs them, 0.33 only the half that does."""
    assert without_pieces(VllmMode(mode), version) is VllmMode(wanted)
    policy = vllm(version=version, mode=mode, piecewise_split=False)
    assert policy.started(Claims.at_level("mixed"), Settings()) is VllmMode(wanted)
    unsplittable = Claims.at_level("mixed", piecewise=False)
    assert vllm(version=version, mode=mode).started(unsplittable, Settings()) is VllmMode(wanted)


def test_breakable_keeps_pieces():
    """Breakable graphs make pieces where nothing is compiled."""
    policy = vllm(version="0.23", piecewise_split=False, breakable=True)
    assert policy.started(Claims.at_level("uniform"), Settings()) is VllmMode.FULL_AND_PIECEWISE


@pytest.mark.parametrize(
    ("mode", "level", "k", "wanted"),
    [
        ("FULL", "uniform", 0, [("batches that aren't uniform decodes", "FULL_AND_PIECEWISE", "support_uniform_only")]),
        ("FULL", "single", 0, [("batches that aren't uniform decodes", "FULL_AND_PIECEWISE", "support_single_only")]),
        ("FULL", "single", 2, [("all batches", "PIECEWISE", "speculation_too_wide")]),
        ("FULL_AND_PIECEWISE", "none", 0, [("uniform decode batches", "PIECEWISE", "support_none")]),
        ("FULL_AND_PIECEWISE", "uniform", 2, []),
        ("PIECEWISE", "none", 0, []),
    ],
)
def test_resolve_says_why(mode, level, k, wanted):
    """Each downgrade is a value: which batches, to what, and why."""
    found = vllm(mode=mode).resolve(Claims.at_level(level), Settings(num_speculative_tokens=k))
    assert [(each.batches, each.resolved, each.reason.value) for each in found] == wanted


def test_resolve_without_pieces_says_so():
    """A mode that loses its pieces says that the model can't be cut."""
    (found,) = vllm().resolve(Claims.at_level("uniform", piecewise=False), Settings())
    assert (found.asked, found.resolved, found.reason) == (
        "FULL_AND_PIECEWISE",
        "FULL_DECODE_ONLY",
        Reason.NO_PIECEWISE,
    )


def test_full_without_support_does_not_start():
    """FULL with attention that can't be captured stops start-up, as in vLLM."""
    policy = vllm(mode="FULL")
    with pytest.raises(SupportError, match="Configure PIECEWISE"):
        policy.plan(policy.sizes(Settings()), Claims.at_level("none"), Settings())


def test_plan_follows_the_resolved_mode():
    """FULL on uniform-only attention plans decode graphs and pieces, no mixed FULL graph."""
    policy, settings = vllm(mode="FULL"), Settings()
    keys = policy.plan(policy.sizes(settings), Claims.at_level("uniform"), settings)
    assert {key.part for key in keys} == {Part.FULL, Part.PIECEWISE}
    assert all(key.query_len == 1 for key in keys if key.part is Part.FULL)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("vllm:version=0.9", "Known: 0.23, 0.33"),
        ("vllm:runner=v3", "Known: v1, v2"),
        ("vllm:mode=SPLIT", "Known: NONE, PIECEWISE, FULL"),
        ("vllm:runner=v1,varlen=true", "Leave them out"),
        ("vllm:version=0.23,runner=v2,drafts=1-8:2", "Leave them out"),
        ("vllm:mode=PIECEWISE,varlen=true", "varlen needs"),
        ("vllm:drafts=1-8", "FIRST-LAST:DRAFTS"),
        ("vllm:drafts=2-8:3", "start at 1"),
        ("vllm:drafts=1-8:3/8-9:2", "overlap"),
        ("vllm:size=3", "doesn't take size"),
    ],
)
def test_bad_arguments(spec, text):
    """An argument that this vLLM doesn't take is an error that says what is allowed."""
    with pytest.raises(ConfigError, match=text):
        get_policy(spec)


def test_default_runners():
    """0.23 defaults to v1 and 0.33 to v2."""
    assert get_policy("vllm:version=0.23").runner == "v1"
    assert get_policy("vllm").runner == "v2"


@pytest.mark.parametrize("version", ["0.23", "0.33"])
def test_default_sizes_and_graphs(version):
    """256 requests give 51 sizes: 51 PIECEWISE and 35 FULL graphs."""
    settings, policy = Settings(), vllm(version=version)
    assert len(default_list(settings, version)) == 51
    keys = policy.plan(policy.sizes(settings), Claims.at_level("mixed"), settings)
    counts = {part: sum(key.part is part for key in keys) for part in Part}
    assert counts == {Part.PIECEWISE: 51, Part.FULL: 35}


@pytest.mark.parametrize(("reqs", "largest_23"), [(6, 4), (12, 8), (100, 96)])
def test_off_grid_maximum(reqs, largest_23):
    """0.23 leaves the largest decode batches without a graph where max_num_seqs is off its grid; 0.33 adds the size."""
    settings = Settings(max_num_reqs=reqs)
    largest = {}
    for version in ("0.23", "0.33"):
        policy = vllm(version=version)
        keys = policy.plan(policy.sizes(settings), Claims.at_level("uniform"), settings)
        largest[version] = max(key.num_reqs for key in keys if key.part is Part.FULL)
    assert largest == {"0.23": largest_23, "0.33": reqs}


def test_lists_are_rounded_for_drafts():
    """v1 rounds sizes 1 to 16 for decodes of 4 tokens to 4, 8, 12, 16; v2 of 0.33 keeps them for pieces."""
    sizes, settings = CaptureSizes((), range(1, 17), ()), Settings(num_speculative_tokens=3)
    for runner, wanted in (("v1", [4, 8, 12, 16]), ("v2", list(range(1, 17)))):
        keys = vllm(runner=runner).plan(sizes, Claims.at_level("uniform"), settings)
        assert sorted(key.num_tokens for key in keys if key.part is Part.PIECEWISE) == wanted


def test_pieces_alone_are_not_rounded_in_v1():
    """v1 leaves the list alone where decodes have no FULL graph; v2 of 0.23 rounds it all the same."""
    sizes, settings = CaptureSizes((), (1, 5, 8), ()), Settings(num_speculative_tokens=2)
    got = {
        runner: [key.num_tokens for key in vllm(version="0.23", runner=runner, mode="PIECEWISE").plan(
            sizes, Claims.at_level("uniform"), settings)]
        for runner in ("v1", "v2")
    }  # fmt: skip
    assert got == {"v1": [8, 5, 1], "v2": [6, 3]}


def test_alignment_edges():
    """One decode row stays where rounding drops every size, and a list without room for one is refused."""
    assert aligned((5,), 3) == (3,)
    assert aligned((5,), 1) == (5,)
    with pytest.raises(LadderError, match="less than one decode row of 7"):
        aligned((1, 4), 7)


def test_sizes_over_the_step_are_refused():
    """A size above the tokens of one step is an error."""
    with pytest.raises(LadderError, match="over the 64 tokens"):
        vllm().plan(CaptureSizes((), (65,), ()), Claims.at_level("uniform"), Settings(max_num_tokens=64))


def test_varlen_needs_support():
    """Variable-length decode graphs are refused where attention captures uniform batches only."""
    with pytest.raises(SupportError, match="Leave varlen out"):
        vllm(varlen=True).started(Claims.at_level("uniform"), Settings(num_speculative_tokens=2))
    started = vllm(varlen=True, mode="FULL").started(
        Claims.at_level("varlen_decode"), Settings(num_speculative_tokens=2)
    )
    assert started is VllmMode.FULL_AND_PIECEWISE


def test_draft_tiers():
    """Gaps and the tail of a schedule keep the drafts of the range before, at most k."""
    schedule = parse_drafts("1-2:6/5-6:2")
    assert tiers(schedule, Settings(max_num_reqs=8, num_speculative_tokens=4)) == [4, 4, 4, 4, 2, 2, 2, 2]
