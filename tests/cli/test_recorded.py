"""`kpolicy explain-log` and `kpolicy simulate --decisions`, on a log written here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from kpolicy.costs import Curve, analytic_costs
from kpolicy.decision import Decision, Launch
from kpolicy.engine import Engine
from kpolicy.kv_span import KvSpan
from kpolicy.ladders import CaptureSizes
from kpolicy.modes import Mode, Rows
from kpolicy.reasons import Reason
from kpolicy.schemas import DecisionEntry, DecisionLogWriter, LogHeader, Profile, read_decision_log, write_profile
from kpolicy.settings import Settings
from kpolicy.shapes import BatchShape
from kpolicy.simulate.recorded import replay
from tests.cli.conftest import Command
from tests.cli.test_bad_input import refused

SHAPES = [
    *[BatchShape.decode(9, 900)] * 6,
    BatchShape(decodes=[(1, 9)], prefills=[(100, 0)], decode_kv_tokens=900),
    BatchShape(prefills=[(5000, 0)]),
]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of decodes, a mixed batch, and a prompt above every size, decided by vLLM's rule."""
    path = tmp_path / "decisions.jsonl"
    settings = Settings(max_num_reqs=64, max_num_tokens=8192)
    engine = Engine("full_and_piecewise", ladder=[1, 2, 4, 8, 16, 128], settings=settings)
    header = LogHeader(
        policy="full_and_piecewise", model="a-model", settings=settings,
        extra={"sizes": {"decode": [1, 2, 4, 8, 16], "mixed": [], "piecewise": [16, 128]}},
    )  # fmt: skip
    with DecisionLogWriter(path, header) as writer:
        for shape in SHAPES:
            writer.write(DecisionEntry.of(shape, engine.decide(shape)))
    return path


def test_the_name_for_vllm_is_the_same_command(kpolicy: Command, log: Path) -> None:
    """A log is SGLang's too, so the command has a name without an engine, which is the one in the list."""
    assert kpolicy("vllm-explain", log) == kpolicy("explain-log", log)
    assert "kpolicy vllm-explain is the same command." in kpolicy("explain-log", "--help").out
    assert "vllm-explain" not in kpolicy("--help").out


def test_explained(kpolicy: Command, log: Path) -> None:
    """Steps are counted by mode and reason, with padding; eager batches are named."""
    report = kpolicy("explain-log", log, "--json").json
    assert report["steps"] == 8
    assert [(row["mode"], row["reason"], row["steps"], row["padding"]) for row in report["modes"]] == [
        ("full", "graph_fits", 7, 6 * 7 + 19),
        ("eager", "above_largest_size", 1, 0),
    ]
    assert report["eager"] == [{"tokens": "4096 to 8191", "kind": "prefill", "steps": 1, "first_step": 7}]


def test_explained_in_words(kpolicy: Command, log: Path) -> None:
    """The table says why in words, and where to look."""
    out = kpolicy("explain-log", log).out
    assert "8 steps by full_and_piecewise (a-model)" in out
    assert "eager: 1 prefill step of 4096 to 8191 tokens; see --step 7" in out.splitlines()


def test_eager_batches_of_few_tokens(kpolicy: Command, tmp_path: Path) -> None:
    """By tokens in doublings, as docs/cli.md says: one is a number alone."""
    path, settings = tmp_path / "decisions.jsonl", Settings(max_num_reqs=8, max_num_tokens=64)
    engine = Engine("eager", settings=settings)
    with DecisionLogWriter(path, LogHeader(policy="eager", settings=settings)) as writer:
        for reqs in (1, 1, 1, 2, 3, 4):
            shape = BatchShape.decode(reqs, 9 * reqs)
            writer.write(DecisionEntry.of(shape, engine.decide(shape)))
    assert [(row["tokens"], row["steps"]) for row in kpolicy("explain-log", path, "--json").json["eager"]] == [
        ("1", 3), ("2 to 3", 2), ("4 to 7", 1),
    ]  # fmt: skip
    assert "eager: 3 decode steps of 1 token; see --step 0" in kpolicy("explain-log", path).out.splitlines()
    docs = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    assert "(text, in doublings: `1`, `2 to 3`, `4 to 7`)" in docs


def test_a_log_that_was_cut_short_is_said(kpolicy: Command, log: Path) -> None:
    """Its steps are told, and that there were more: on standard error, and in the JSON."""
    whole = kpolicy("explain-log", log, "--json")
    assert (whole.err, whole.json["cut_short"]) == ("", False)
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:4]) + lines[4][:20])
    for arguments in (("explain-log", log), ("simulate", "--decisions", log)):
        ended = kpolicy(*arguments)
        assert (ended.code, ended.err.count("\n")) == (0, 1)
        assert f"{log} has no last line" in ended.err
        assert "these 3 are missing" in ended.err
        assert kpolicy(*arguments, "--json").json["cut_short"] is True


def test_numbers_stand_whole_at_any_width(kpolicy: Command, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the tables of other commands: no lines, and words fold for numbers' sake."""
    monkeypatch.setenv("COLUMNS", "80")
    for arguments in (("explain-log", log), ("simulate", "--decisions", log)):
        out = kpolicy(*arguments).out
        assert not set("│┃━") & set(out)
        assert max(map(len, out.splitlines()[1:])) <= 80
    assert "  5,000  " in kpolicy("explain-log", log).out


def test_an_eager_launch_that_was_padded_is_priced_with_its_padding(tmp_path: Path) -> None:
    """As ranks run a graph's size eagerly where others replay it."""
    path, shape = tmp_path / "padded.jsonl", BatchShape.decode(5)
    decision = Decision(Mode.EAGER, (Launch(Rows.ALL, None, padded_tokens=4096),), Reason.RANK_NEEDS_EAGER)
    with DecisionLogWriter(path, LogHeader()) as writer:
        writer.write(DecisionEntry.of(shape, decision))
    recorded = replay(read_decision_log(path), ["eager"])[0]
    assert recorded.padding == 4091
    assert recorded.cycle_us == analytic_costs().cost(decision.launches, shape.numbers).cycle_us


def test_what_isnt_known_of_a_profile_is_said(kpolicy: Command, log: Path, tmp_path: Path) -> None:
    """Of one with a model's name, once, beside the JSON that is as without."""
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, '
        '"num_attention_heads": 4, "vocab_size": 100}'
    )
    profile = tmp_path / "p.json"
    write_profile(profile, Profile(costs=analytic_costs(), device="a device", model="some/name"))
    ended = kpolicy(
        "explain-log", log, "--step", 6, "--profile", profile, "--config", tmp_path / "config.json", "--json"
    )
    assert ended.code == 0
    assert ended.json["recorded"]["mode"] == "full"
    assert ended.err.startswith("kpolicy: the profile is of some/name by its own word; whether that is ")
    assert ended.err.count("\n") == 1


def test_one_step(kpolicy: Command, log: Path) -> None:
    """One step is explained over the log's own ladder: no FULL graph takes prompts there."""
    explained = kpolicy("explain-log", log, "--step", 6, "--json").json
    assert explained["recorded"]["mode"] == "full"
    ways = {each["way"]: each for each in explained["considered"]}
    assert ways["piecewise"]["launches"] == "all: PIECEWISE 128t"
    assert ways["full"]["launches"] is None


@pytest.mark.parametrize("step", [8, -1])
def test_no_such_step(kpolicy: Command, log: Path, step: int) -> None:
    """A step that the log doesn't have is refused, with those it has."""
    result = kpolicy("explain-log", log, f"--step={step}")
    assert result.code == 2
    assert "0 to 7" in result.err


@pytest.mark.parametrize("policy", ["full_and_piecewise", "full", "auto"])
def test_what_was_recorded_costs_what_its_policy_does(tmp_path: Path, policy: str) -> None:
    """Graphs of decodes have a curve of their own beside those that hold prompts; a log names both."""
    path, sizes = tmp_path / "decisions.jsonl", CaptureSizes((1, 16), (16, 128), (16, 128))
    curve = analytic_costs().full
    costs = attrs.evolve(analytic_costs(), mixed=Curve(curve.sizes, [3 * us for us in curve.us]))
    engine = Engine(policy, ladder=sizes, settings=Settings(max_num_reqs=64), costs=costs)
    with DecisionLogWriter(path, LogHeader(policy=policy, settings=Settings(max_num_reqs=64))) as writer:
        for shape in SHAPES:
            writer.write(DecisionEntry.of(shape, engine.decide(shape)))
    recorded, again = replay(read_decision_log(path), [policy], costs=costs, ladder=sizes)
    assert recorded.modes["full"] >= 6
    assert again.same == again.steps == 8
    assert recorded.cycle_us == pytest.approx(again.cycle_us)


def test_decided_again(kpolicy: Command, log: Path) -> None:
    """Policies decide the log's batches again; the recorded decisions come first, and the rule's own are the same."""
    result = kpolicy("simulate", "--decisions", log, "--policy", "auto", "--policy", "eager", "--json").json
    recorded, auto, eager = result["policies"]
    assert recorded["policy"] == "as recorded"
    assert recorded["modes"] == {"full": 7, "eager": 1}
    assert recorded["same"] == recorded["steps"] == 8
    assert recorded["padding"] == 61
    assert auto["cycle_us"] <= eager["cycle_us"]
    assert eager["same"] == 1
    # By analytic costs, which have no limits to be outside of.
    assert [each["outside_contexts"] for each in result["policies"]] == [0, 0, 0]


def test_decided_again_in_words(kpolicy: Command, log: Path) -> None:
    """The table has a row for each policy."""
    out = kpolicy("simulate", "--decisions", log).out
    assert all(name in out for name in ("as recorded", "auto", "vllm"))


def test_what_the_table_was_not_made_for_is_told(kpolicy: Command, log: Path, tmp_path: Path) -> None:
    """Batches of a size or a context outside the cost table are counted for each policy; or that it doesn't know."""
    given = ("simulate", "--decisions", log, "--policy", "eager")
    assert "outside the cost table" not in kpolicy(*given).out
    costs = attrs.evolve(
        analytic_costs(), measured=True, eager=Curve((1, 128), (100.0, 200.0)),
        kv_span=KvSpan(decode_row=99, decode_step=2000, prefill=8192),
    )  # fmt: skip
    profile = tmp_path / "p.json"
    write_profile(profile, Profile(costs=costs, device="a device", model="a model"))
    out = kpolicy(*given, "--profile", profile).out
    # Seven batches have decode rows over 100 tokens each; the last has 5,000 tokens.
    assert "eager: 1 step (12.5%) of a size outside the cost table" in out
    assert "eager: 7 steps (87.5%) of a context outside the cost table" in out
    write_profile(profile, Profile(costs=attrs.evolve(costs, kv_span=None), device="a device", model="a model"))
    assert "contexts: not recorded" in kpolicy(*given, "--profile", profile).out
    (recorded, _) = kpolicy(*given, "--profile", profile, "--json").json["policies"]
    assert (recorded["outside_sizes"], recorded["outside_contexts"]) == (1, None)


def test_decisions_or_traces(kpolicy: Command, log: Path) -> None:
    """A log and traces together are refused."""
    result = kpolicy("simulate", log, "--decisions", log)
    assert result.code == 2
    assert "takes the place of traces" in result.err


def test_an_empty_log(kpolicy: Command, tmp_path: Path) -> None:
    """A log without decisions is refused by both."""
    path = tmp_path / "empty.jsonl"
    DecisionLogWriter(path).close()
    for arguments in (("explain-log", path), ("simulate", "--decisions", path)):
        assert kpolicy(*arguments).code == 2


def test_sizes_that_are_none(kpolicy: Command, tmp_path: Path) -> None:
    """A header whose sizes can't be read is refused, with what they are."""
    path = tmp_path / "odd.jsonl"
    with DecisionLogWriter(path, LogHeader(extra={"sizes": [1, 2]})) as writer:
        shape = BatchShape.decode(1)
        writer.write(DecisionEntry.of(shape, Engine("eager").decide(shape)))
    result = kpolicy("simulate", "--decisions", path)
    assert result.code == 2
    assert "decode, mixed, piecewise" in result.err


def changed(log: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The log with its first decision changed."""
    lines = log.read_text().splitlines()
    entry = json.loads(lines[1])
    change(entry["decision"])
    lines[1] = json.dumps(entry)
    other = log.with_name("changed.jsonl")
    other.write_text("\n".join(lines) + "\n")
    return other


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda decision: decision.pop("mode"), "mode is missing; wanted text"),
        (lambda decision: decision.update(launches=None), "launches is None; wanted a list"),
        (lambda decision: decision["launches"][0].update(rows="some"), "wanted one of all, decode, prefill"),
        (lambda decision: decision["launches"][0].update(graph=5), "launches[0].graph is 5; wanted text"),
        (lambda decision: decision["launches"][0].update(repeat=0), "repeat 0; counts start at 0, repeat at 1"),
    ],
)
@pytest.mark.parametrize("command", [("explain-log",), ("simulate", "--decisions")])
def test_a_decision_that_is_none_is_a_named_error(
    kpolicy: Command, log: Path, command: tuple[str, ...], change: Callable[[dict[str, Any]], object], said: str
) -> None:
    """Of every command that reads logs, with the line and the field."""
    refused(kpolicy(*command, changed(log, change)), "changed.jsonl, line 2, decision", said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda decision: decision["launches"][0].update(graph="WHOLE 8 rows"), "replays 'WHOLE 8 rows'"),
        (lambda decision: decision.update(launches=[]), "step 0 of the log has 0 launches"),
        (lambda decision: decision.update(launches=decision["launches"] * 3), "step 0 of the log has 3 launches"),
    ],
)
def test_launches_without_a_price_are_refused(
    kpolicy: Command, log: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    """A graph that can't be read isn't priced as an eager launch, nor is a step without launches free."""
    refused(kpolicy("simulate", "--decisions", changed(log, change)), said)


def test_sizes_are_lists(kpolicy: Command, tmp_path: Path) -> None:
    """Text is no list of sizes: "12" isn't 1 and 2."""
    path = tmp_path / "odd.jsonl"
    with DecisionLogWriter(path, LogHeader(extra={"sizes": {"decode": "12"}})) as writer:
        shape = BatchShape.decode(1)
        writer.write(DecisionEntry.of(shape, Engine("eager").decide(shape)))
    refused(kpolicy("simulate", "--decisions", path), "{'decode': '12'}", "lists of tokens by kind")


def test_a_rank_without_rows_is_explained(kpolicy: Command, tmp_path: Path) -> None:
    """An idle data-parallel rank logs empty batches; they count as such."""
    path = tmp_path / "idle.jsonl"
    engine = Engine("eager")
    with DecisionLogWriter(path) as writer:
        for shape in (BatchShape(), BatchShape(decodes=[(1, 2)], prefills=[(5, 0)])):
            writer.write(DecisionEntry.of(shape, engine.decide(shape)))
    ended = kpolicy("explain-log", path, "--json")
    assert ended.code == 0, ended.err
    assert {(each["tokens"], each["kind"]) for each in ended.json["eager"]} == {("0", "empty"), ("4 to 7", "mixed")}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("--window", 5), "--window"),
        (("--rate", 2, "--start", 1), "--start, --rate"),
        (("--seed", 3), "--seed"),
        (("--ranks", 2, "--kv-tokens", 9999), "--kv-tokens, --ranks"),
        (("--no-prefix-reuse",), "--no-prefix-reuse"),
        (("--device", "A100"), "--device"),
        (("--max-num-tokens", 64, "--max-num-reqs", 9), "--max-num-tokens, --max-num-reqs"),
        (("--budget-bytes", 1), "--budget-bytes"),
        (("--out", "x.json"), "--out"),
        (("--step-log", "x.jsonl"), "--step-log"),
    ],
)
def test_options_of_a_server_are_refused(kpolicy: Command, log: Path, given: tuple[object, ...], named: str) -> None:
    """What can't change how recorded batches are decided isn't taken and ignored."""
    ended = kpolicy("simulate", "--decisions", log, *given)
    assert ended.code == 2
    assert ended.out == ""
    assert f"leave out {named}, or give a trace" in ended.err
    assert not list(log.parent.glob("x.json*"))
