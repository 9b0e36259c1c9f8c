"""Versioned files: round trips, forward compatibility, and everything that can be wrong with them."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kpolicy import schemas
from kpolicy.attention import Claims, HostParams
from kpolicy.budgets import Budget
from kpolicy.costs import analytic_costs
from kpolicy.decision import Decision, Launch
from kpolicy.errors import ConfigError, SchemaError
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureSizes, plan_keys
from kpolicy.modes import Mode, Part, Rows, SplitForm
from kpolicy.policies.auto import AutoPolicy
from kpolicy.reasons import Reason
from kpolicy.schemas import (
    MOST_KV_BYTES,
    VERSIONS,
    DecisionEntry,
    DecisionLogWriter,
    LadderPlan,
    Log,
    LogHeader,
    Profile,
    QueueState,
    StepEntry,
    StepLogWriter,
    dumps,
    loads,
    read_decision_log,
    read_plan,
    read_profile,
    read_step_log,
    write_plan,
    write_profile,
)
from kpolicy.settings import Settings
from kpolicy.shapes import BatchShape
from kpolicy.step_effects import StepEffects
from tests import strategies as drawn
from tests.test_reading import written_to

names = st.text(max_size=8)
versions = st.dictionaries(names, names, max_size=3)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
free = st.dictionaries(names, json_values, max_size=3)

profiles = st.builds(
    Profile, costs=drawn.cost_tables(), device=names, model=names, versions=versions, measured_at=names, command=names,
    kv_bytes_per_token=st.none() | st.integers(1, MOST_KV_BYTES),
)  # fmt: skip


@st.composite
def plans(draw: st.DrawFn) -> LadderPlan:
    deployment = draw(drawn.settings())
    attention, sizes = draw(drawn.claims()), draw(drawn.ladders(deployment))
    limit = st.none() | st.integers(0, 2**50)
    return LadderPlan(
        sizes=sizes,
        keys=plan_keys(sizes, attention, deployment),
        settings=deployment,
        attention=attention,
        budget=draw(st.builds(Budget, limit, limit, limit, st.none() | st.floats(0, 1e9))),
        policy=draw(names),
        planned_from=draw(free),
    )


@st.composite
def steps(draw: st.DrawFn) -> StepEntry:
    """A step as the policy `auto` decides it, with some of the times and queues that were seen."""
    context = draw(drawn.contexts())
    shape = attrs.evolve(draw(drawn.shapes()), facts=draw(free))
    time = st.none() | st.floats(0, 1e9)
    count = st.integers(0, 2**40)
    optional = st.none() | count
    return StepEntry.of(
        draw(count),
        shape,
        AutoPolicy().decide(shape, context),
        device_us=draw(time),
        host_us=draw(time),
        cycle_us=draw(time),
        ready_us=draw(st.none() | st.dictionaries(names, st.floats(0, 1e9), max_size=2)),
        queue=draw(st.none() | st.builds(QueueState, waiting=count, running=count, kv_tokens_used=optional)),
    )


PROFILE = Profile(costs=analytic_costs(), device="one device", model="8B", versions={"torch": "2.11"})
DEPLOYMENT = Settings(max_num_reqs=4, max_num_tokens=16)
PLAN = LadderPlan(
    sizes=CaptureSizes((1, 2), (), (4,)),
    keys=(GraphKey(Part.FULL, 2, 2, query_len=1), GraphKey(Part.PIECEWISE, 4)),
    settings=DEPLOYMENT,
    attention=Claims(uniform_query_len=1),
    budget=Budget(bytes=1 << 30),
)
SHAPE = BatchShape(decodes=((1, 3),), prefills=((5, 7),), decode_kv_tokens=40, max_kv_len=20, facts={"phase": "mixed"})
SPLIT = Decision(
    Mode.SPLIT,
    (
        Launch(Rows.DECODE, GraphKey(Part.FULL, 4, 4, query_len=1), repeat=2),
        Launch(Rows.PREFILL, None, stream=1, reason=Reason.NO_GRAPHS),
    ),
    Reason.DECODES_KEEP_GRAPH,
    SplitForm.DECODES_BESIDE,
)
STEP = StepEntry.of(0, SHAPE, SPLIT, cycle_us=12.5, ready_us={"decode": 4.0}, queue=QueueState(waiting=1, running=4))
DECISION = DecisionEntry.of(SHAPE, SPLIT)


def step_log(path: Path, *entries: StepEntry) -> Path:
    with StepLogWriter(path, LogHeader(policy="auto", settings=DEPLOYMENT)) as log:
        for entry in entries:
            log.write(entry)
    return path


@settings(deadline=None)
@given(profiles)
def test_any_profile_round_trips(profile: Profile) -> None:
    """A profile reads back equal, every number of its cost table included."""
    assert loads(dumps(profile), Profile) == profile


@settings(deadline=None)
@given(plans())
def test_any_plan_round_trips(plan: LadderPlan) -> None:
    """A ladder plan reads back equal, keys, settings, attention and budget included."""
    assert loads(dumps(plan), LadderPlan) == plan


@settings(max_examples=50, deadline=None)
@given(st.lists(steps(), max_size=3), versions)
def test_any_log_round_trips(tmp_path_factory: pytest.TempPathFactory, entries: list[StepEntry], found: Any) -> None:
    """A step log and a decision log read back equal, with their header, and aren't marked cut short."""
    folder = tmp_path_factory.mktemp("logs")
    header = LogHeader(policy="auto", versions=found, settings=DEPLOYMENT)
    with StepLogWriter(folder / "steps.jsonl", header) as log:
        for entry in entries:
            log.write(entry)
    assert read_step_log(folder / "steps.jsonl") == Log(header, tuple(entries), False)
    decisions = [DecisionEntry(shape=entry.shape, decision={"mode": entry.mode}, reason="r") for entry in entries]
    with DecisionLogWriter(folder / "decisions.jsonl", header) as decision_log:
        for decision in decisions:
            decision_log.write(decision)
    assert read_decision_log(folder / "decisions.jsonl") == Log(header, tuple(decisions), False)


def test_files_round_trip(tmp_path: Path) -> None:
    """Profiles and plans read back from their files, and writing leaves no other file behind."""
    write_profile(tmp_path / "a.json", PROFILE)
    write_profile(str(tmp_path / "a.json"), PROFILE)
    write_plan(tmp_path / "b.json", PLAN)
    assert read_profile(tmp_path / "a.json") == PROFILE
    plan = read_plan(str(tmp_path / "b.json"))
    assert plan == PLAN
    # An enum member equals its text: look at the types too.
    assert [type(key.part) for key in plan.keys] == [Part, Part]
    assert type(plan.attention.host_params) is HostParams
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]


EFFECTS = {
    "warm_host_share": [0.7, 0.9], "eager_new_us": 40.0, "padding_share": [0.5, 1.0], "one_row_overlap": 0.3,
    "one_row_slowdown": 1.7, "many_rows_overlap": 0.7, "many_rows_slowdown": 1.5,
    "outlasted_share": [[64, 0.5], [2048, 1.0]],
}  # fmt: skip


def test_what_steps_tell_stands_beside_a_tables_other_numbers() -> None:
    """As in files from before it was a type of its own; left out, each is as if a table told nothing of it."""
    costs = json.loads(dumps(PROFILE))["costs"]
    assert "effects" not in costs
    assert {name: costs[name] for name in EFFECTS} == {
        "warm_host_share": [1.0, 1.0], "eager_new_us": 0.0, "padding_share": [1.0, 1.0], "one_row_overlap": None,
        "one_row_slowdown": None, "many_rows_overlap": None, "many_rows_slowdown": None,
        "outlasted_share": None,
    }  # fmt: skip
    data = json.loads(dumps(PROFILE))
    data["costs"] |= EFFECTS
    found = loads(json.dumps(data), Profile)
    assert found.costs.effects == StepEffects(
        warm_host_share=(0.7, 0.9), eager_new_us=40.0, padding_share=(0.5, 1.0), one_row_overlap=0.3,
        one_row_slowdown=1.7, many_rows_overlap=0.7, many_rows_slowdown=1.5,
        outlasted_share=((64, 0.5), (2048, 1.0)),
    )  # fmt: skip
    assert json.loads(dumps(found)) == data
    for name in EFFECTS:
        left = loads(changed(found, "costs", name, to=...), Profile).costs.effects
        assert left == attrs.evolve(found.costs.effects, **{name: getattr(StepEffects(), name)})
    # What this kpolicy doesn't know is ignored: a field of that name too, and what some earlier ones made of tables.
    for name, to in (("effects", {"eager_new_us": 1.0}), ("counts_rows", True), ("first_pieces_us", 3.0)):
        assert loads(changed(found, "costs", name, to=to), Profile) == found


@pytest.mark.parametrize(
    ("name", "to", "said"),
    [
        ("eager_new_us", "4", "costs.eager_new_us is '4'; wanted a finite number."),
        ("padding_share", [0.5, "1"], "costs.padding_share[1] is '1'; wanted a finite number."),
        ("warm_host_share", [0.0, 1.0], "costs can't be used: warm_host_share is (0.0, 1.0)"),
        ("one_row_overlap", 2.5, "costs can't be used: one_row_overlap is 2.5"),
        ("one_row_slowdown", 0.9, "costs can't be used: one_row_slowdown is 0.9"),
        ("many_rows_overlap", -1, "costs can't be used: many_rows_overlap is -1"),
        ("many_rows_slowdown", 9, "costs can't be used: many_rows_slowdown is 9"),
        ("outlasted_share", [[64, 1.5]], "costs can't be used: outlasted_share is ((64, 1.5),)"),
        ("outlasted_share", [[64, 0.5], [2.5, 1]], "costs.outlasted_share[1][0] is 2.5; wanted a whole number"),
        ("outlasted_share", [[64]], "costs.outlasted_share[0]"),
        ("decode_slowdown", 0.9, "costs can't be used: decode_slowdown is 0.9"),
        ("decode_slowdown", "2", "costs.decode_slowdown is '2'; wanted a finite number"),
    ],
)
def test_a_wrong_number_of_steps_is_named_by_its_place_in_the_file(name: str, to: Any, said: str) -> None:
    with pytest.raises(SchemaError) as caught:
        loads(changed(PROFILE, "costs", name, to=to), Profile)
    assert said in str(caught.value)


def test_a_step_log_line_holds_what_a_simulator_needs(tmp_path: Path) -> None:
    """A line has decode runs, prefill pairs, KV tokens, launches with keys and padding, the reason and the times."""
    lines = step_log(tmp_path / "log", STEP).read_text().splitlines()
    assert [json.loads(line).get("schema") for line in lines] == ["kpolicy/step_log", None, None]
    assert json.loads(lines[1]) == {
        "step": 0,
        "shape": {
            "decodes": [[1, 3]],
            "prefills": [[5, 7]],
            "decode_kv_tokens": 40,
            "max_kv_len": 20,
            "facts": {"phase": "mixed"},
        },
        "mode": "split/decodes_beside",
        "launches": [
            {
                "rows": "decode",
                "key": {"part": "full", "num_tokens": 4, "num_reqs": 4, "query_len": 1},
                "padding": 2,
                "repeat": 2,
            },
            {"rows": "prefill", "stream": 1, "reason": "no_graphs"},
        ],
        "reason": "decodes_keep_graph",
        "decode_steps": 2,
        "cycle_us": 12.5,
        "ready_us": {"decode": 4.0},
        "queue": {"waiting": 1, "running": 4},
    }
    assert (STEP.num_decodes, STEP.kv_tokens) == (3, 52)


def test_names_of_closed_sets_read_as_their_members(tmp_path: Path) -> None:
    """Rows, parts and forbidden modes come back as enum members, not as texts that equal them."""
    step = attrs.evolve(STEP, shape=attrs.evolve(SHAPE, forbidden={Mode.EAGER, Mode.FULL}))
    (found,) = read_step_log(step_log(tmp_path / "log", step)).entries
    assert {type(mode) for mode in found.shape.forbidden} == {Mode}
    assert [type(launch.rows) for launch in found.launches] == [Rows, Rows]
    assert found.shape.numbers == step.shape.numbers


# Forward compatibility.


def changed(value: Profile | LadderPlan, *path: Any, to: Any) -> str:
    """The text of a file with one field replaced, or taken out where `to` is `...`."""
    data = json.loads(dumps(value))
    place = data
    for step in path[:-1]:
        place = place[step]
    if to is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return json.dumps(data)


@settings(deadline=None)
@given(st.integers(0, 99), free)
def test_a_higher_minor_version_reads(minor: int, news: dict[str, Any]) -> None:
    """The same major reads with unknown fields at any depth ignored; top-level ones are kept and written back."""
    news = {f"new {name}": value for name, value in news.items()}
    data = json.loads(dumps(PLAN)) | {"version": [1, minor]} | news
    for inner in (data["sizes"], data["settings"], data["keys"][0], data["budget"]):
        inner.update(news)
    found = loads(json.dumps(data), LadderPlan)
    assert attrs.evolve(found, extra={}) == PLAN
    assert found.extra == news
    again = json.loads(dumps(found))
    assert {name: again[name] for name in news} == news
    assert again["version"] == [1, 0]


def test_known_fields_win_over_extra_ones() -> None:
    """An extra field that has a known field's name doesn't replace it, nor the header."""
    profile = attrs.evolve(PROFILE, extra={"device": "other", "version": [9, 9], "schema": "x"})
    assert loads(dumps(profile), Profile) == PROFILE


@pytest.mark.parametrize("kind", [Profile, LadderPlan])
def test_a_newer_major_version_is_refused(kind: Any) -> None:
    """A newer major number is an error that says which version reads, and to upgrade; an older one, to write anew."""
    value = PROFILE if kind is Profile else PLAN
    with pytest.raises(SchemaError, match=r"version 2\.3; this kpolicy reads 1\.x .* Upgrade kpolicy"):
        loads(changed(value, "version", to=[2, 3]), kind)
    with pytest.raises(SchemaError, match=r"version 0\.9.* Write the file again"):
        loads(changed(value, "version", to=[0, 9]), kind)


def test_a_newer_log_is_refused(tmp_path: Path) -> None:
    """A log of a newer major version is refused by its first line."""
    path = step_log(tmp_path / "log", STEP)
    path.write_text(path.read_text().replace('"version":[1,0]', '"version":[2,0]'))
    with pytest.raises(SchemaError, match=r"line 1 is a step_log of version 2\.0"):
        read_step_log(path)


def test_unknown_fields_of_log_lines_are_ignored(tmp_path: Path) -> None:
    """Lines of a higher minor version read without the fields that they add; header fields are kept."""
    path = step_log(tmp_path / "log", STEP)
    header, line, end = path.read_text().splitlines()
    lines = [json.loads(header) | {"version": [1, 4], "site": "x"}, json.loads(line) | {"watts": 3}, json.loads(end)]
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    log = read_step_log(path)
    assert (log.entries, log.header.extra, log.cut_short) == ((STEP,), {"site": "x"}, False)


# Bad files.

WRONG = [
    (("costs", "full", "us", 2), "fast", r"profile: costs\.full\.us\[2\] is 'fast'; wanted a finite number"),
    (("costs", "full", "sizes"), "1234", r"costs\.full\.sizes is '1234'; wanted a list"),
    (("costs", "full", "sizes", 0), 1.5, r"costs\.full\.sizes\[0\] is 1\.5; wanted a whole number"),
    (("costs", "full"), ..., r"costs\.full is missing; wanted an object \(Curve\)"),
    (("costs", "version"), ..., r"costs\.version is missing; wanted text"),
    (("costs", "measured"), 1, r"costs\.measured is 1; wanted true or false"),
    (("costs", "capture_us"), [1.0], r"costs\.capture_us is \[1\.0\]; wanted a list of 2 values"),
    (("costs", "overlap_cost"), 7, r"costs can't be used: overlap_cost is 7"),
    (("costs", "step_us"), True, r"costs\.step_us is True"),
    (("costs", "step_us"), float("nan"), "holds NaN"),
    (("costs", "step_us"), float("-inf"), "holds -Infinity"),
    (("costs", "step_us"), 10**400, r"costs\.step_us is 1000.*wanted a finite number"),
    (("costs",), [], r"costs is \[\]; wanted an object of fields"),
    (("versions", "torch"), 2, r"versions\['torch'\] is 2; wanted text"),
    (("device",), None, "device is None; wanted text"),
    (("schema",), "kpolicy/ladder_plan", "schema is 'kpolicy/ladder_plan'; wanted 'kpolicy/profile'"),
    (("schema",), ..., "schema is None"),
    (("version",), [1], r"version is \[1\]; wanted two whole numbers"),
    (("version",), [True, 0], "wanted two whole numbers"),
]


@pytest.mark.parametrize(("path", "value", "said"), WRONG)
def test_a_wrong_field_is_named(path: tuple[Any, ...], value: Any, said: str) -> None:
    """A missing or wrong field is a SchemaError with its path, its value and what is wanted."""
    with pytest.raises(SchemaError, match=said):
        loads(changed(PROFILE, *path, to=value), Profile)


def test_a_wrong_mode_or_part_lists_the_right_ones() -> None:
    """A name that isn't one of a closed set is answered with the set."""
    with pytest.raises(SchemaError, match=r"keys\[1\]\.part is 'half'; wanted one of full, piecewise"):
        loads(changed(PLAN, "keys", 1, "part", to="half"), LadderPlan)
    with pytest.raises(SchemaError, match=r"keys\[0\] can't be used: num_tokens of a graph key is 0"):
        loads(changed(PLAN, "keys", 0, "num_tokens", to=0), LadderPlan)


NOT_JSON: list[tuple[Any, str]] = [
    ("", "cut short"),
    ("[1, 2]", r"holds \[1, 2\]; wanted an object"),
    ("{'a': 1}", "isn't JSON"),
    (b"\xff\xfe{}", "can't decode byte"),
    ("[" * 100_000, "recursion"),
    ("9" * 5000, "digits"),
    ('{"x": 1e999}', "holds 1e999; numbers must be finite"),
]


@pytest.mark.parametrize(("text", "said"), NOT_JSON)
def test_what_is_not_a_json_object_is_refused(text: Any, said: str) -> None:
    """Text that isn't a JSON object of finite numbers in UTF-8 is a SchemaError."""
    with pytest.raises(SchemaError, match=said):
        loads(text, Profile)


@pytest.mark.parametrize("value", [PROFILE, PLAN])
def test_a_file_cut_anywhere_is_refused(value: Any) -> None:
    """A profile or plan cut at any byte is a SchemaError."""
    data = dumps(value).encode()
    for cut in range(len(data.rstrip())):
        with pytest.raises(SchemaError, match=r"cut short|isn't JSON"):
            loads(data[:cut], type(value))


@pytest.mark.parametrize("kind", ["step", "decision"])
def test_a_log_cut_anywhere_is_refused_or_marked(tmp_path: Path, kind: str) -> None:
    """A log cut in its header is a SchemaError; cut later it reads, up to the last whole line, marked cut short."""
    path: Path = tmp_path / "log"
    read: Any
    if kind == "step":
        entries: list[Any] = [STEP, attrs.evolve(STEP, step=1)]
        step_log(path, *entries)
        read = read_step_log
    else:
        entries = [DECISION, DECISION]
        with DecisionLogWriter(path) as log:
            for entry in entries:
                log.write(entry)
        read = read_decision_log
    data = path.read_bytes()
    assert not read(path).cut_short
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        whole_lines = data[:cut].count(b"\n")
        if not whole_lines:
            with pytest.raises(SchemaError, match=r"cut short|isn't JSON|no whole first line"):
                read(path)
        else:
            found = read(path)
            assert found.cut_short
            assert list(found.entries) == entries[: whole_lines - 1]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([PROFILE, PLAN]), st.data())
def test_no_change_to_a_file_raises_anything_else(value: Any, data: st.DataObject) -> None:
    """With any one value replaced by any other, a file reads or is a SchemaError; what reads can be written."""
    whole = json.loads(dumps(value))
    place = whole
    while True:
        step = data.draw(st.sampled_from(list(place) if isinstance(place, dict) else list(range(len(place)))))
        if not place[step] or not isinstance(place[step], (dict, list)) or data.draw(st.booleans()):
            break
        place = place[step]
    place[step] = data.draw(json_values | st.floats() | st.just(10**400))
    try:
        found = loads(json.dumps(whole), type(value))
    except SchemaError:
        return
    assert loads(dumps(found), type(value)) == found


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_change_to_a_log_raises_anything_else(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """With any bytes of a log replaced by any others, it reads or is a SchemaError."""
    path = step_log(tmp_path_factory.mktemp("fuzz") / "log", STEP, STEP)
    text = path.read_bytes()
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 20)))
    path.write_bytes(
        text[:start] + data.draw(st.binary(max_size=4) | st.sampled_from([b"\n", b"-1", b"{}"])) + text[end:]
    )
    try:
        found = read_step_log(path)
    except SchemaError:
        return
    assert len(found.entries) <= 2 or found.cut_short


def test_a_bad_line_is_named_by_its_number(tmp_path: Path) -> None:
    """A whole line that isn't an entry, a wrong count and lines after the end are SchemaErrors with the line."""
    path = step_log(tmp_path / "log", STEP)
    header, line, end = path.read_text().splitlines()
    for lines, said in (
        ([header, line.replace('"step":0', '"step":"x"'), end], r"line 2: step is 'x'; wanted a whole number"),
        ([header, line[:-9], end], "line 2 .*JSON|line 2 is cut short"),
        ([header, line, line, end], "line 4 says that 1 lines came before it, and 2 did"),
        ([header, line, end, line], "line 4 follows the log's last line"),
        ([header, line.replace("[[1,3]]", "[[0,3]]"), end], r"line 2: shape can't be used: decodes has the run"),
    ):
        path.write_text("\n".join(lines) + "\n")
        with pytest.raises(SchemaError, match=said):
            read_step_log(path)


def test_the_wrong_log_is_named(tmp_path: Path) -> None:
    """A step log isn't read as a decision log, nor a profile as a log."""
    path = step_log(tmp_path / "log", STEP)
    with pytest.raises(SchemaError, match="schema is 'kpolicy/step_log'; wanted 'kpolicy/decision_log'"):
        read_decision_log(path)
    write_profile(path, PROFILE)
    with pytest.raises(SchemaError):
        read_step_log(path)


# Writing.


def test_a_writer_that_leaves_by_an_error_marks_its_log(tmp_path: Path) -> None:
    """A log whose writer was left by an exception reads up to there and is marked cut short."""
    path = tmp_path / "log"
    log = StepLogWriter(path)

    def interrupted() -> None:
        with log:
            log.write(STEP)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert read_step_log(path) == Log(LogHeader(), (STEP,), True)
    with pytest.raises(ConfigError, match="is closed"):
        log.write(STEP)


FORKS = """
import os, sys
from kpolicy.errors import ConfigError
from tests.test_schemas import STEP, StepLogWriter
log = StepLogWriter(sys.argv[1])
log.write(STEP)
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    assert not log.forked
else:
    assert log.forked
    try:
        log.write(STEP)
    except ConfigError as error:
        assert "which forked this one" in str(error)
    else:
        sys.exit("it was written")
    log.flush()
    if "closed" in sys.argv:
        log.close()
    StepLogWriter(sys.argv[1] + ".own").close()
    sys.exit(0)
log.write(STEP)
log.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system doesn't fork")
@pytest.mark.parametrize("how", ["closed", "ended"])
def test_a_forked_process_leaves_a_log_to_the_other(tmp_path: Path, how: str) -> None:
    """Its interpreter ends as any; lines that were waiting are written once, and it may write a log of its own."""
    path = tmp_path / "log"
    root = Path(__file__).parents[1]
    command = [sys.executable, "-c", FORKS, str(path), how]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert read_step_log(path) == Log(LogHeader(), (STEP, STEP), False)
    assert read_step_log(f"{path}.own") == Log(LogHeader(), (), False)


def test_a_fork_beside_a_log_that_fails_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where lines can't be handed over before it, the log's own process is told at its next call."""
    with StepLogWriter(tmp_path / "log") as log:
        tried = []

        def fails() -> None:
            tried.append(1)
            raise ConfigError("the disk is full")

        monkeypatch.setattr(log, "flush", fails)
        schemas._before_fork()
        assert tried


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_not_written(tmp_path: Path, value: float) -> None:
    """NaN and infinity are refused before anything is written."""
    path = tmp_path / "a.json"
    with pytest.raises(SchemaError, match="the profile can't be written as JSON"):
        write_profile(path, attrs.evolve(PROFILE, extra={"x": value}))
    assert not path.exists()
    with StepLogWriter(path) as log:
        with pytest.raises(SchemaError, match="entry 0 of"):
            log.write(attrs.evolve(STEP, cycle_us=value))
        log.write(STEP)
    assert read_step_log(path).entries == (STEP,)


def test_a_path_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """A path that can't be written or read is a ConfigError with the path, and nothing is left behind."""
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "none" / "a.json", tmp_path / "folder", f"{tmp_path}/a\0b"):
        with pytest.raises(ConfigError, match="can't write") as caught:
            write_profile(path, PROFILE)
        assert str(path) in str(caught.value)
        with pytest.raises(ConfigError, match="can't write"):
            StepLogWriter(path)
        with pytest.raises(ConfigError, match="can't read"):
            read_profile(path)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


OF_TEXT = {"model_type": "qwen2_vl", "text_config": {"model_type": "qwen2_vl_text", "hidden_size": 896}}
"""A config as its library writes it of one that had the language model's fields at the top, and no type of its own."""


@pytest.mark.parametrize(
    ("noted", "config", "differs"),
    [
        (None, {"model_type": "qwen2", "hidden_size": 896}, None),
        ("qwen2", {"model_type": "qwen2", "hidden_size": 896}, None),
        ({"model_type": "qwen2", "hidden_size": 896}, {"model_type": "qwen2", "hidden_size": 896}, None),
        ({"model_type": "qwen2", "num_hidden_layers": 24, "head": 1}, {"model_type": "qwen2", "vocab_size": 9}, None),
        ({"model_type": "qwen2_vl", "hidden_size": 896}, OF_TEXT, None),
        ({"model_type": "qwen2_vl", "hidden_size": 1536}, OF_TEXT, "another model: hidden_size 1536 and not 896"),
        (
            {"model_type": "llama", "hidden_size": 4096},
            {"model_type": "qwen2", "hidden_size": 896},
            "another model: model_type llama and not qwen2, hidden_size 4096 and not 896",
        ),
    ],
)
def test_a_plan_is_held_to_the_model_that_it_notes(
    tmp_path: Path, noted: object, config: dict[str, object], differs: str | None
) -> None:
    """By what both say; one made without a config is any model's, and without a config any plan is read."""
    plan = attrs.evolve(PLAN, planned_from={} if noted is None else {"model": noted})
    path = tmp_path / "plan.json"
    write_plan(path, plan)
    assert read_plan(path) == plan
    if differs is None:
        assert read_plan(path, config) == plan
    else:
        with pytest.raises(ConfigError, match=rf"plan.json was made for {differs}\. Plan for this one"):
            read_plan(path, config)


@pytest.mark.parametrize("device", ["/dev/urandom", "/dev/null"])
@pytest.mark.parametrize("read", [read_profile, read_plan, read_step_log, read_decision_log])
def test_no_device_is_read(read: Callable[[Any], Any], device: str) -> None:
    """It needn't ever end; a link to one is no other."""
    if not Path(device).is_char_device():
        pytest.skip(f"there is no {device}")
    with pytest.raises(ConfigError, match=f"can't read {device}: it is a device"):
        read(device)


def test_a_link_to_a_device_is_not_read(tmp_path: Path) -> None:
    link = tmp_path / "profile.json"
    link.symlink_to("/dev/urandom")
    with pytest.raises(ConfigError, match="it is a device"):
        read_profile(link)


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    """As a shell's ``<(command)`` and ``/dev/stdin`` behind a pipe are, in pieces of any length."""
    text = dumps(PROFILE).encode()
    writer = written_to(tmp_path / "pipe", [text[:7], text[7:]])
    assert read_profile(tmp_path / "pipe") == PROFILE
    writer.join()


def test_what_never_ends_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that somebody writes to for ever, and a file longer than any of its kind; a log may be longer."""
    writer = written_to(tmp_path / "pipe", itertools.repeat(b" " * 65536))
    monkeypatch.setattr(schemas, "MOST_BYTES", 1 << 20)
    with pytest.raises(ConfigError, match=r"pipe: it is longer than 1 MiB"):
        read_profile(tmp_path / "pipe")
    writer.join()
    (tmp_path / "long").write_bytes(b"{" * (1 << 20) + b"{")
    with pytest.raises(ConfigError, match=r"long: it is longer than 1 MiB"):
        read_plan(tmp_path / "long")
    with pytest.raises(SchemaError, match="isn't JSON"):
        read_step_log(tmp_path / "long")


@pytest.mark.parametrize("size", [None, 1, 8])
def test_a_profile_says_how_a_model_was_split(size: int | None) -> None:
    """So do its costs, where it does; an older file says nothing."""
    profile = attrs.evolve(PROFILE, tensor_parallel_size=size)
    assert loads(dumps(profile), Profile) == profile
    assert attrs.evolve(profile, costs=attrs.evolve(profile.costs, measured=True)).costs.measured_over == size
    old = json.loads(dumps(profile))
    del old["tensor_parallel_size"]
    assert loads(json.dumps(old), Profile).tensor_parallel_size is None


@pytest.mark.parametrize("size", [0, -1, 1.0, "8", True])
def test_a_split_that_cannot_be_is_refused(size: Any) -> None:
    """In a file as in code."""
    data = json.loads(dumps(PROFILE)) | {"tensor_parallel_size": size}
    with pytest.raises(SchemaError, match="tensor_parallel_size"):
        loads(json.dumps(data), Profile)


def test_a_profile_says_its_bytes_of_kv() -> None:
    """They stand beside the costs; files from before the field say nothing and read."""
    data = json.loads(dumps(attrs.evolve(PROFILE, kv_bytes_per_token=12_288)))
    assert data["kv_bytes_per_token"] == loads(json.dumps(data), Profile).kv_bytes_per_token == 12_288
    assert "kv_bytes_per_token" not in data["costs"]
    del data["kv_bytes_per_token"]
    assert loads(json.dumps(data), Profile) == PROFILE


@pytest.mark.parametrize("wrong", [0, -1, MOST_KV_BYTES + 1, 2.5, True, "12288"])
def test_bytes_of_kv_are_a_whole_number(wrong: Any) -> None:
    """From 1 up; from a file and from Python the error has the field and the value."""
    data = json.loads(dumps(PROFILE)) | {"kv_bytes_per_token": wrong}
    with pytest.raises(SchemaError, match=rf"^p\.json: .*kv_bytes_per_token is '?{wrong}'?; "):
        loads(json.dumps(data), Profile, name="p.json")
    with pytest.raises(ConfigError, match=r"^kv_bytes_per_token is .* from 1 to 1099511627776.* Leave it out"):
        attrs.evolve(PROFILE, kv_bytes_per_token=wrong)


def test_every_kind_writes_its_version(tmp_path: Path) -> None:
    """The header of each kind of file has the kind's name and the version that this kpolicy writes."""
    step_log(tmp_path / "step_log", STEP)
    DecisionLogWriter(tmp_path / "decision_log").close()
    (tmp_path / "profile").write_text(dumps(PROFILE))
    (tmp_path / "ladder_plan").write_text(dumps(PLAN))
    for kind, version in VERSIONS.items():
        text = (tmp_path / kind).read_text()
        header = json.loads(text.splitlines()[0] if kind.endswith("log") else text)
        assert (header["schema"], header["version"]) == (f"kpolicy/{kind}", list(version))


def test_schemas_load_cattrs_on_first_use() -> None:
    """Importing the schemas brings in neither cattrs nor json nor numpy."""
    code = "import sys, kpolicy.schemas; print([m for m in ('cattrs', 'numpy', 'json', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ('"cycle_us":-5', r"line 2: cycle_us is -5\.0; wanted microseconds from 0 up"),
        ('"decode_steps":0', "decode_steps 0; wanted"),
        ('"launches":[{"rows":"all","repeat":0}]', r"launches\[0\] has repeat 0"),
        ('"launches":[{"rows":"all","padding":-3}]', "padding -3 and stream 0"),
    ],
)
def test_steps_that_none_can_be_are_refused(tmp_path: Path, field: str, said: str) -> None:
    """A time below nothing spoilt means without a word, a launch that never ran was a division by zero."""
    path = tmp_path / "steps.jsonl"
    header = '{"schema":"kpolicy/step_log","version":[1,0]}'
    path.write_text(f'{header}\n{{"step":0,"shape":{{"decodes":[[1,3]]}},"mode":"full","reason":"r",{field}}}\n')
    with pytest.raises(SchemaError, match=said):
        read_step_log(path)


def test_a_log_takes_entries_of_its_own_kind(tmp_path: Path) -> None:
    """One of another kind would make the whole file unreadable."""
    step = StepEntry(step=0, shape=BatchShape.decode(3), mode="full", reason="r")
    said = r"entry 0 of .*d\.jsonl is StepEntry.*it takes a DecisionEntry"
    with DecisionLogWriter(tmp_path / "d.jsonl") as writer, pytest.raises(ConfigError, match=said):
        writer.write(step)  # type: ignore[arg-type]


_RIGHT = {
    "mode": "split", "form": "in_turn", "why": "", "assumes": [],
    "launches": [{"rows": "decode", "graph": None, "tokens": 1, "padding": 0, "stream": 0, "repeat": 1}],
}  # fmt: skip
_VALUES = ("all", "x", "", None, True, 1.0, -1, 0, 1, [], {}, [{}], [{"rows": "all"}], [[]], [None])


def test_decisions_that_are_plainly_right_are_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a log makes each entry once: whose decision looks right isn't made a second time to see that."""
    assert schemas._well_decided(_RIGHT)
    with DecisionLogWriter(tmp_path / "log", LogHeader()) as log:
        for _ in range(3):
            log.write(DecisionEntry(shape=BatchShape.decode(1), decision=_RIGHT, reason="r"))
    structured = schemas._structure
    made: list[Any] = []
    monkeypatch.setattr(schemas, "_structure", lambda *args: made.append(args[1]) or structured(*args))
    assert len(read_decision_log(tmp_path / "log").entries) == 3
    assert made.count(DecisionEntry) == 3
    assert schemas._Decided not in made


def test_what_looks_right_of_a_decision_is_right() -> None:
    """The quick look takes nothing that is refused otherwise, whichever field holds what."""
    launch = _RIGHT["launches"][0]
    wrong = 0
    for value in _VALUES:
        decisions = [{**_RIGHT, name: value} for name in _RIGHT]
        decisions += [{**_RIGHT, "launches": [launch, {**launch, name: value}]} for name in launch]
        decisions += [{name: value for name in _RIGHT if name != left} for left in _RIGHT]
        for decision in decisions:
            if not _taken(decision):
                wrong += 1
                assert not schemas._well_decided(decision), decision
    assert wrong > 50


def _taken(decision: dict[str, Any]) -> bool:
    try:
        schemas._structure(decision, schemas._Decided, "a decision")
    except SchemaError:
        return False
    return True
