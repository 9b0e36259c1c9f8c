"""Settings, and the sizes they come to."""

import itertools

import pytest

from kpolicy.attention.support import Claims
from kpolicy.errors import ConfigError, KPolicyError
from kpolicy.ladders import CaptureSizes
from kpolicy.policies.sglang import prefill_sizes as sglang_prefill_sizes
from kpolicy.schemas import LadderPlan, write_plan
from kpolicy.settings import Settings
from kpolicy_sglang.config import Config
from kpolicy_sglang.ladder import decode_sizes, default_decode_sizes, default_prefill_sizes, prefill_sizes


def test_off_unless_asked():
    """Nothing in the environment, or a plain 0, is off."""
    assert Config.from_env({}) is None
    assert Config.from_env({"KPOLICY_SGLANG": "0"}) is None
    assert Config.from_env({"KPOLICY_DECISION_LOG": "x"}) is None


def test_settings_from_the_environment():
    """Each setting is read as its type."""
    config = Config.from_env(
        {
            "KPOLICY_POLICY": "full_and_piecewise", "KPOLICY_SPLIT": "no", "KPOLICY_DECODE_SIZES": "1,2, 8",
            "KPOLICY_MLA_PREFILL": "1",
            "KPOLICY_SUMMARY_SECONDS": "1.5", "KPOLICY_DECISION_LOG": "/x", "KPOLICY_UNKNOWN": "left alone",
        }
    )  # fmt: skip
    assert config == Config(
        policy="full_and_piecewise", split=False, decode_sizes=(1, 2, 8), summary_seconds=1.5, decision_log="/x",
        mla_prefill=True,
    )  # fmt: skip
    assert Config().mla_prefill is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KPOLICY_SGLANG", "maybe"),
        ("KPOLICY_SPLIT", "maybe"),
        ("KPOLICY_DECODE_SIZES", "1,x"),
        ("KPOLICY_DECODE_SIZES", "0,1"),
        ("KPOLICY_PIECEWISE_SIZES", "4,4"),
        ("KPOLICY_PIECEWISE_SIZES", ","),
        ("KPOLICY_SUMMARY_SECONDS", "-1"),
        ("KPOLICY_SUMMARY_SECONDS", "nan"),
        ("KPOLICY_CALIBRATE_SECONDS", "0"),
        ("KPOLICY_CALIBRATE_SECONDS", "inf"),
        ("KPOLICY_GAP_MS", "0"),
        ("KPOLICY_GAP_MS", "soon"),
        ("KPOLICY_TURNS", "half"),
        ("KPOLICY_OBJECTIVE", "speed"),
        ("KPOLICY_POLICY", "aut"),
    ],
)
def test_bad_values(name, value):
    """A value that can't be used is an error that names it."""
    with pytest.raises(KPolicyError, match=f"{name}|objective|aut"):
        Config.from_env({"KPOLICY_SGLANG": "1", name: value})


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [("SPLIT", "maybe", "1 or 0"), ("DECODE_SIZES", "1,x", "for example 1,2,4"), ("GAP_MS", "soon", "a number")],
)
def test_what_cannot_be_read_says_what_can(name, value, allowed):
    """In words, and not as a type of Python's."""
    with pytest.raises(KPolicyError, match=rf"^KPOLICY_{name} is '{value}'; it is .*{allowed}\.$"):
        Config.from_env({"KPOLICY_SGLANG": "1", f"KPOLICY_{name}": value})


STOCK_DECODE, STOCK_PREFILL = (1, 2, 4, 8, 12, 16, *range(24, 257, 8)), sglang_prefill_sizes(8192)


@pytest.mark.parametrize("most", [1, 2, 7, 13, 256, 257, 600, 768, 1000, 1024, 5000])
def test_default_decode_sizes(most):
    """They rise, end with the most requests, and no batch pads further than with SGLang's own sizes."""
    sizes = default_decode_sizes(STOCK_DECODE, most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    assert all(b - a <= 256 for a, b in itertools.pairwise(sizes))
    assert {size for size in STOCK_DECODE if size < most} < set(sizes)
    assert default_decode_sizes((), most)[-1] == most


@pytest.mark.parametrize("most", [300, 384, 500, 512, 700, 1024, 1500])
@pytest.mark.parametrize("own", [2, 256, 384, 512, 600, 1024])
def test_default_decode_sizes_go_on_from_any_list(own, most):
    """Wherever SGLang's own list ends, on a GPU of any size, each size is there once and they rise."""
    stock = tuple(range(1, own + 1))
    sizes = default_decode_sizes(stock, most)
    assert all(a < b for a, b in itertools.pairwise(sizes))
    assert sizes[: min(own, most)] == stock[:most]
    assert sizes[-1] == most


@pytest.mark.parametrize(
    ("own", "told", "largest"), [(256, 4096, 1024), (8, 512, 8), (512, None, 1024), (256, 300, 300)]
)
def test_memory_bounds_the_default_decode_sizes(own, told, largest):
    """However many requests may run, a small GPU keeps SGLang's sizes and a large one has 1,024."""
    assert decode_sizes(Config(), (1, 2, own), told, own)[-1] == largest


def test_default_prefill_sizes():
    """They are SGLang's own, end with the largest step, and there is always one."""
    assert default_prefill_sizes(STOCK_PREFILL, 8192) == STOCK_PREFILL
    assert default_prefill_sizes(STOCK_PREFILL, 2000)[-3:] == (1536, 1792, 2000)
    assert default_prefill_sizes((), 20) == (20,)


@pytest.mark.parametrize(
    ("most", "found"),
    [
        (2048, (64, 256, 512, 1024, 2048)), (8192, (64, 256, 512, 1024, 2048, 4096, 8192)),
        (200, (64, 200)), (3000, (64, 256, 512, 1024, 2048, 3000)),
    ],
)  # fmt: skip
def test_few_prefill_sizes_are_a_doubling_apart(most, found):
    """Where SGLang has no such graphs: 64, 256, each twice the last, and the largest step."""
    assert default_prefill_sizes(STOCK_PREFILL, most, few=True) == found


def test_few_more_than_sglangs():
    """Up to four times the requests take four sizes more than SGLang's 94; its own list takes 32 more."""
    assert len(STOCK_DECODE) + len(STOCK_PREFILL) == 94
    assert len(default_decode_sizes(STOCK_DECODE, 1024)) + len(default_prefill_sizes(STOCK_PREFILL, 8192)) == 98


def test_given_sizes_go_before_a_plan(tmp_path):
    """Sizes in the settings, then those of a plan, then the default ones."""
    plan = tmp_path / "plan.json"
    settings = Settings(max_num_reqs=64, max_num_tokens=4096)
    sizes = CaptureSizes((1, 16, 64), (), (100, 3000))
    write_plan(plan, LadderPlan(sizes=sizes, keys=(), settings=settings, attention=Claims.at_level("mixed")))
    planned = Config(plan=str(plan))
    assert decode_sizes(planned, STOCK_DECODE, 48, 256) == (1, 16)
    assert prefill_sizes(planned, STOCK_PREFILL, 2048) == (100,)
    given = Config(plan=str(plan), decode_sizes=(2, 4), piecewise_sizes=(7,))
    assert (decode_sizes(given, (), None, 256), prefill_sizes(given, (), 99)) == ((2, 4), (7,))
    assert decode_sizes(Config(), STOCK_DECODE, None, 256)[-1] == 1024


@pytest.mark.parametrize(
    ("sizes", "find", "told"),
    [
        (CaptureSizes((), (), (64,)), decode_sizes, "no sizes of decodes"),
        (CaptureSizes((8,), (), ()), prefill_sizes, "no sizes of prompts"),
        (CaptureSizes((8,), (), (3000,)), prefill_sizes, "3,000 tokens, and a step has 256 at most"),
    ],
)
def test_a_plan_without_sizes_of_a_phase_is_told(tmp_path, sizes, find, told):
    """SGLang would end with an empty list of decodes; other prompts' sizes than were given aren't captured silently."""
    plan = str(tmp_path / "plan.json")
    write_plan(plan, LadderPlan(sizes=sizes, keys=(), settings=Settings(), attention=Claims.at_level("mixed")))
    with pytest.raises(ConfigError, match=told):
        find(Config(plan=plan), (4, 8), 256, **({"sglang_most": 256} if find is decode_sizes else {}))


def test_given_sizes_that_no_step_has_are_told():
    """Sizes of the settings aren't left out silently."""
    with pytest.raises(ConfigError, match="16,384 tokens, and a step has 8,192 at most"):
        prefill_sizes(Config(piecewise_sizes=(16_384, 32_768)), STOCK_PREFILL, 8192)


def test_a_plan_with_drafts_is_in_tokens(tmp_path):
    """A plan's decode sizes are tokens, SGLang's requests."""
    plan = tmp_path / "plan.json"
    settings = Settings(max_num_reqs=64, max_num_tokens=4096, num_speculative_tokens=3)
    sizes = CaptureSizes((4, 64, 256), (), (100,))
    write_plan(plan, LadderPlan(sizes=sizes, keys=(), settings=settings, attention=Claims.at_level("mixed")))
    assert decode_sizes(Config(plan=str(plan)), STOCK_DECODE, 64, 256) == (1, 16, 64)


def test_largest_decode_size_follows_the_requests():
    """SGLang's list ends at 256 on such a GPU; kpolicy's at the requests that may run."""
    assert decode_sizes(Config(), STOCK_DECODE, 768, 256)[-1] == 768
