"""The GPU benchmarks, dry: a toy on the CPU. What is tested is that they run, go on, add up and find what is wrong."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks.command import command_line  # noqa: E402
from benchmarks.gpu import beside, correct, end_to_end, gpt2, kernels, overlap, regret, soak, startup  # noqa: E402
from benchmarks.gpu.common import Results, interval_of_mean, load_model, open_engines, slices_of  # noqa: E402
from kpolicy.modes import Rows  # noqa: E402

RAW = Path(__file__).parents[2] / "benchmarks/results/h200/raw"
QWEN: dict[str, Any] = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    "max_position_embeddings": 32768, "tie_word_embeddings": True,
}  # fmt: skip


TOY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256,
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that outnumber the cores make tiny operators slow."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """A dry run's options; the result goes to out.json."""
    folder = tmp_path / "qwen"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN))
    return ["--config", str(folder), "--device", "cpu", "--tiny", "--out", str(tmp_path / "out.json")]


def read(arguments: list[str]) -> Any:
    return json.loads(Path(arguments[-1]).read_text())


def test_overlap(arguments: list[str], tmp_path: Path) -> None:
    """Slices run, go on, and add up; every form of overlap is among the steps."""
    assert overlap.main([*arguments[:-1], str(tmp_path / "a.json"), "--count", "40"]) == 0
    assert overlap.main([*arguments[:-1], str(tmp_path / "b.json"), "--first", "250", "--count", "10"]) == 0
    assert overlap.main([*arguments[:-1], str(tmp_path / "b.json"), "--first", "250", "--count", "10"]) == 0
    assert overlap.main(["--merge", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--out", arguments[-1]]) == 0
    total = read(arguments)["total"]
    assert (total["steps"], total["differences"]) == (50, [])
    ways = {"beside x1", "decodes beside x2", "decodes beside x4", "decodes beside x8"}
    assert {way.removesuffix(" spread") for way in total["ways"]} == ways
    assert any(way.endswith(" spread") for way in total["ways"])


def test_overlap_that_hangs_ends(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog is started every 25 steps, and stopped once they are done or one raised."""
    told: list[Any] = []
    watchdog = SimpleNamespace(
        dump_traceback_later=lambda seconds, **how: told.append((seconds, how)),
        cancel_dump_traceback_later=lambda: told.append("stopped"),
    )
    monkeypatch.setattr(overlap, "faulthandler", watchdog)
    assert overlap.main([*arguments, "--count", "30"]) == 0
    assert told == [(overlap.HANG_S, {"exit": True})] * 2 + ["stopped"]
    told.clear()

    def fails(*_given: Any) -> Any:
        raise RuntimeError("the device is lost")

    # It would end the process a minute later, whatever that did by then.
    monkeypatch.setattr(overlap, "launched", fails)
    with pytest.raises(RuntimeError, match="the device is lost"):
        overlap.main([*arguments[:-1], str(tmp_path / "fails.json"), "--count", "30"])
    assert told == [(overlap.HANG_S, {"exit": True}), "stopped"]


@pytest.mark.parametrize(("what", "named"), [("logits", "logits by 1"), ("tokens", "sampled tokens")])
def test_overlap_sees_a_difference(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, what: str, named: str
) -> None:
    """Where the halves in turn compute something else, the step is named and the exit code is 1."""
    run, calls = overlap.launched, 0

    def wrong(executor: Any, decision: Any, inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        logits, sampled, outputs = run(executor, decision, inputs)
        if calls == 4:
            with torch.inference_mode():
                (logits if what == "logits" else sampled)[-1].add_(1)
        return logits, sampled, outputs

    monkeypatch.setattr(overlap, "launched", wrong)
    assert overlap.main([*arguments, "--count", "5"]) == 1
    (difference,) = read(arguments)["total"]["differences"]
    assert difference.startswith("block 0, step 1")
    assert named in difference


def test_correct(arguments: list[str]) -> None:
    """Random steps equal eager ones, and every mode is as near to float32 as EAGER is, about."""
    assert correct.main([*arguments, "--count", "40"]) == 0
    result = read(arguments)
    assert result["command"].startswith("python -m benchmarks.gpu.correct --config qwen --device cpu --tiny --out")
    assert result["command"].endswith(" --count 40")
    assert result["total"]["steps"] == 40
    assert result["total"]["differences"] == []
    assert result["total"]["padded"] > 0
    assert result["cells"]["reference"]["ratio"] <= 2
    assert result["cells"]["reference"]["rows_modes"] == 3 * result["cells"]["reference"]["rows_eager"]


def test_correct_where_no_row_is_wanted(arguments: list[str]) -> None:
    """These blocks have steps of only a chunk in a prompt's midst, in FULL: nothing is sampled, eagerly either."""
    for first in ("100", "300"):
        assert correct.main([*arguments, "--part", "bits", "--first", first, "--count", "100"]) == 0
    assert read(arguments)["total"]["differences"] == []


def test_correct_sees_a_stray_write(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that changes KV of no row of its own is named, once: later steps are held to the KV as it is then."""
    run, calls = correct.launched, 0

    def stray(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        ran = run(*given)
        if calls == 2:
            bench.model.kv_caches()[0][bench.model.num_slots - 1] += 1
        return ran

    made = correct.Bench.__init__

    def init(self: Any, *given: Any) -> None:
        nonlocal bench
        bench = self
        made(self, *given)

    bench: Any = None
    monkeypatch.setattr(correct.Bench, "__init__", init)
    monkeypatch.setattr(correct, "launched", stray)
    assert correct.main([*arguments, "--count", "5", "--part", "bits"]) == 1
    (difference,) = read(arguments)["total"]["differences"]
    assert difference.startswith("block 0, step 1")
    assert "which no row has" in difference


def test_the_reference_has_float32_weights_of_its_own() -> None:
    """Tied weights stay tied, values are those of the model, and its own weights keep their type."""
    embedding, head = torch.nn.Embedding(8, 4, dtype=torch.bfloat16), torch.nn.Linear(4, 8, dtype=torch.bfloat16)
    head.weight = embedding.weight
    module = torch.nn.Sequential(embedding, torch.nn.BatchNorm1d(4), head)
    exact = correct.in_float32(module)
    assert exact[0].weight is exact[2].weight
    assert {each.dtype for each in exact.parameters()} == {torch.float32}
    assert torch.equal(exact[2].weight, head.weight.float())
    assert head.weight.dtype is torch.bfloat16
    assert exact[1].running_mean.shape == (4,)


def test_soak(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Cycles go on where the file ends; requests are served or cancelled, and the registry ends empty."""
    assert soak.main([*arguments, "--cycles", "2", "--steps", "40"]) == 1
    assert read(arguments)["total"]["memory_flat"] is None, "two cycles warm up, and tell nothing"
    monkeypatch.setattr(soak, "WARM", 0)
    monkeypatch.setattr(soak, "SLACK_BYTES", 1 << 40)
    assert soak.main([*arguments, "--cycles", "3", "--steps", "40"]) == 0
    total = read(arguments)["total"]
    assert total["memory_flat"] is True
    assert total["cycles"] == 3
    assert total["problems"] == []
    assert total["events"]["served"] > 20
    assert {cell["process"] for cell in read(arguments)["cells"].values()} == {1, 2}


def soaked(held: list[int], *, device: list[int] | None = None) -> dict[str, dict[str, Any]]:
    """Cells of a soak whose process, and device, held those MiB at each cycle's end."""
    cell = {"events": {}, "modes": {}, "steps": 1, "seconds": 1.0, "problems": [], "process": 1}
    other = device or [0] * len(held)
    return {
        str(i): {**cell, "memory": {"process": 0, "torch": mib << 20, "device": other[i] << 20}}
        for i, mib in enumerate(held)
    }


@pytest.mark.parametrize(("after", "grown", "flat"), [(1, 1024, None), (2, 1024, False), (2, 1, True)])
def test_soak_sees_a_leak(after: int, grown: int, flat: bool | None) -> None:
    """Memory that grows with every cycle isn't flat; of a process too short to tell nothing is claimed."""
    cells = soaked([i * grown for i in range(soak.WARM + after)])
    assert soak.summary(cells, alone=False)["memory_flat"] is flat


def test_soak_takes_no_workspace_for_a_leak() -> None:
    """A policy's first turn may bring its streams' workspaces, as on an H200; the next turns may not."""
    turn = len(soak.POLICIES)
    assert soak.summary(soaked([976, 976, 1010, 1010, *[1044] * 11]), alone=False)["memory_flat"]
    assert not soak.summary(soaked([34 * i // turn for i in range(4 * turn)]), alone=False)["memory_flat"]


def test_soak_leaves_a_shared_device_out() -> None:
    """What other processes take of it is nobody's growth; alone on the device it is."""
    cells = soaked([0] * 9, device=[0] * 8 + [1024])
    shared, alone = (soak.summary(cells, alone=alone) for alone in (False, True))
    assert shared["memory_flat"]
    assert "device" not in shared["growth_bytes_after_warming_up"]
    assert not alone["memory_flat"]


def test_beside(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way gets a point, and the halves their times alone: steps run, on a clock of their tokens."""
    run = beside.ran

    def timed(executor: Any, decision: Any, inputs: Any) -> tuple[float, Any]:
        run(executor, decision, inputs)
        numbers, halves = inputs.numbers, len(decision.launches) == 2
        decode_us = 10.0 * decision.launches[0].repeat
        us = 40.0 + numbers.num_prefill_tokens if numbers.num_prefills else decode_us
        us = max(us, decode_us) if halves else us
        ready_us = {Rows.DECODE: decode_us} if halves else {Rows.ALL: us}
        return us, SimpleNamespace(ready_us=ready_us, ready=[SimpleNamespace(us=min(ready_us.values()))])

    monkeypatch.setattr(beside, "ran", timed)
    assert beside.main([*arguments, "--rounds", "2"]) == 0
    cell = read(arguments)["cells"]["64/4"]
    points = {name: (point["first_token_us"], point["gap_p99_us"]) for name, point in cell["points"].items()}
    # A prompt of 64 in chunks of 60 and 4, with four decodes; whole in one step; or beside ten decode steps or four.
    assert points["piecewise 64"] == points["full 64"] == (144.0, 100.0)
    assert points["piecewise 68"] == points["full 68"] == (104.0, 104.0)
    assert points["beside 64 x10"] == (104.0, 14.0)
    assert points["beside 64 x4"] == (104.0, 74.0)
    assert cell["points"]["beside 64 x4"]["rounds"] == [[104.0, 74.0]]
    assert [each["size"] for each in cell["alone"]] == [16, 32, 64]
    assert [each["repeat"] for each in cell["alone"]] == [6, 7, 10]
    assert cell["alone"][2]["prompt_us"] == cell["alone"][2]["beside_us"] == 104.0
    assert [each["paid_share"] for each in cell["alone"]] == [0.0, 0.0, 0.0]
    assert all(us > 0 for each in cell["alone"] for us in each["host_us"].values())
    # As soon as the whole prompt in one step, and gaps of a seventh; before two steps with ten times their pace.
    (whole,) = [row for row in cell["frontier"] if row["against"] == "full 68"]
    assert whole["gap_p99"] == {"ratio": 7.429, "beside": "64 x10", "each_round": [7.429]}
    assert (cell["wins"]["gap_p99"]["ratio"], cell["wins"]["gap_p99"]["beside"]) == (10.0, "64 x14")
    assert read(arguments)["summary"]["hold"] == 1


def test_beside_writes_a_cell_with_its_summary(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is cut off leaves a file whose summary is of every cell in it."""
    write = beside.Results.write

    def cut_off(results: beside.Results) -> None:
        write(results)
        if results.cells:
            raise KeyboardInterrupt

    monkeypatch.setattr(beside.Results, "write", cut_off)
    with pytest.raises(KeyboardInterrupt):
        beside.main([*arguments, "--rounds", "2"])
    found = read(arguments)
    assert list(found["cells"]) == ["64/4"]
    assert found["summary"] == beside.summary(found["cells"])


@pytest.mark.parametrize("lacking", ["piecewise", "decode"])
def test_beside_without_a_graph(arguments: list[str], lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs that memory didn't hold cost the ways that need them, and no cell."""
    key = beside.Bench.key

    def without(bench: Any, kind: str, tokens: int) -> Any:
        return None if kind == lacking and tokens in (4, 64) else key(bench, kind, tokens)

    monkeypatch.setattr(beside.Bench, "key", without)
    assert beside.main([*arguments, "--rounds", "2"]) == 0
    cell = read(arguments)["cells"]["64/4"]
    assert [each["size"] for each in cell["alone"]] == ([16, 32] if lacking == "piecewise" else [])
    assert not any(name.startswith("beside 64") for name in cell["points"])
    assert cell["points"]


def point(way: str, size: int, first: float, gap: float) -> dict[str, Any]:
    figures = {"first_token_us": first, "gap_p99_us": gap, "rounds": [[first, gap], [first, 2 * gap]]}
    return {"way": way, "size": size, "repeat": 2, **figures}


def test_the_frontier() -> None:
    """A way beside wins over a chunk size where it loses nothing to it in the other figure, and over no other."""
    mixed = [
        point("piecewise", 1, 100.0, 10.0), point("full", 2, 60.0, 20.0), point("piecewise", 2, 60.0, 21.0),
    ]  # fmt: skip
    # Half of the first one's time, but with a longer gap; the second's figures are hardly better in the one.
    found = beside.compare([*mixed, point("beside", 3, 50.0, 15.0)])
    assert [row["against"] for row in found["frontier"]] == ["piecewise 1", "full 2"], "one loses to another"
    assert found["frontier"][0] == {"against": "piecewise 1", "first_token": None, "gap_p99": None} | {
        "gap_p99": {"ratio": 0.667, "beside": "3 x2", "each_round": [0.667, 0.667]}
    }
    assert found["wins"]["first_token"] == {
        "against": "full 2", "ratio": 1.2, "beside": "3 x2", "each_round": [1.2, 1.2]
    }  # fmt: skip
    assert found["wins"]["gap_p99"]["ratio"] == 1.333
    assert found["least"] == 0.667
    # Without a loss to either, and twice as good as the one in the one figure and as the other in the other.
    found = beside.compare([*mixed, point("beside", 3, 50.0, 10.0)])
    assert [found["wins"][figure]["ratio"] for figure in beside.FIGURES] == [2.0, 2.0]
    assert found["least"] == 2.0
    # Worse than either in one: nothing is won.
    found = beside.compare([*mixed, point("beside", 3, 101.0, 30.0)])
    assert found["wins"] == {"first_token": None, "gap_p99": None}
    assert found["least"] == 0.0
    assert beside.compare(mixed)["wins"] is None
    assert beside.compare([point("beside", 3, 50.0, 15.0)])["wins"] is None


def test_what_beside_comes_to_over_all_cells() -> None:
    """Cells in which either figure is one and a half times better, and those over every chunk size."""
    cells = {
        "a": {"wins": {"first_token": {"ratio": 1.6}, "gap_p99": None}, "least": 1.2},
        "b": {"wins": {"first_token": {"ratio": 1.0}, "gap_p99": {"ratio": 3.0}}, "least": 1.5},
        "c": {"wins": None, "least": None},
    }
    found = beside.summary(cells)
    assert (found["cells"], found["hold"], found["hold_over_every_chunk_size"]) == (3, 2, 1)
    assert (found["first_token"], found["gap_p99"]) == (1.0, 0.0)
    assert beside.summary({})["hold"] == 0


def test_cells_and_sizes_of_beside() -> None:
    """The ends of both ranges come before what is between; a size holds each whole prompt with all rows."""
    cells = beside.ends_first([2048, 8192, 4096], [8, 64, 32])
    assert cells[:4] == [(2048, 8), (2048, 64), (8192, 8), (8192, 64)]
    assert len(set(cells)) == 9
    sizes = beside.mixed_sizes(beside.SIZES, [2048, 8192], [8, 64])
    assert sizes == sorted({*beside.SIZES, *beside.BETWEEN, 2112, 8256})
    assert beside.mixed_sizes((16, 32, 64), [64], [4]) == [16, 32, 64, 68]


def test_what_is_given_up() -> None:
    """Ways that are far behind in both; the best chunk size stays, however far ahead a way beside is."""
    ways = [beside.Way(name, size, 1, []) for name, size in (("full", 1), ("full", 2), ("beside", 3), ("beside", 4))]
    times = dict(zip((way.label for way in ways), (100.0, 40.0, 10.0, 20.0), strict=True))
    kept = beside._hopeful(ways, {name: [us] for name, us in times.items()}, {name: [us] for name, us in times.items()})
    assert [way.size for way in kept] == [2, 3]


def test_startup(arguments: list[str]) -> None:
    """Every list is captured, lazy has fewer graphs, and its first step captures none."""
    assert startup.main([*arguments, "--pairs", "1"]) == 0
    cells = read(arguments)["cells"]
    assert [row["graphs"] > 0 for row in cells["lists"]] == [True] * 3
    assert cells["lists"][-1]["graphs"] < cells["lists"][1]["graphs"]
    assert cells["first_step"]["pairs"] == 3
    assert all(row["first_seconds"] > 0 for row in cells["lists"][:2])
    assert cells["steady"]["lazy_graphs"] <= cells["steady"]["full_graphs"]
    lazy, full = (cells["steady"]["costs"][which].partition(", corrected")[0] for which in ("lazy", "full"))
    assert lazy == full != ""
    assert cells["steady"]["settled"]
    # The ratio is the mean of pairs, these are medians: about the same.
    lazy_ms, full_ms = (cells["steady"]["step_ms"][which] for which in ("lazy", "full"))
    assert lazy_ms / full_ms == pytest.approx(cells["steady"]["ratio"], rel=0.5)
    assert {"device_bytes", "torch_reserved_bytes", "torch_live_bytes"} <= set(cells["lists"][0])


def test_no_list_pays_for_kernels_in_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a process loads once, and those that one list alone needs; all lists have been captured before."""
    loaded: set[str] = set()

    def captured(_: Any, name: str, __: Any) -> dict[str, Any]:
        new = {"all", name} - loaded
        loaded.update(new)
        return {"list": name, "seconds": 1.0 + 9.0 * ("all" in new) + 3.0 * (name in new)}

    engine = SimpleNamespace(registry=SimpleNamespace(captured=list), release=lambda: None)
    bench = SimpleNamespace(
        options=SimpleNamespace(plan=None), used=int, engine=lambda **_: engine, serve=lambda *_: None
    )
    monkeypatch.setattr(startup, "captured", captured)
    monkeypatch.setattr(startup, "told", lambda *_: {})
    rows = startup.lists(bench, [], 1)[:2]  # type: ignore[arg-type]
    assert [(row["seconds"], row["first_seconds"]) for row in rows] == [(1.0, 13.0), (1.0, 4.0)]


def test_end_to_end(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each policy serves the same requests each round; the table has ratios to the replica's."""
    from kpolicy.serving import real_run

    serve, served, paces = real_run.serve_model, [], []

    def told(trace: Any, *given: Any, **named: Any) -> Any:
        """Count steps, and tokens as if the last request came after all of them."""
        if "label" not in named:
            return serve(trace, *given, **named)
        counts, steps, until_the_end = named["on_step"], 0, end_to_end.Arriving(trace)
        until_the_end.span_s = math.inf

        def on_step(*step: Any) -> None:
            nonlocal steps
            steps += 1
            counts(*step)
            until_the_end(*step)

        result, log = serve(trace, *given, **named | {"on_step": on_step})
        paces.append((named["label"], given[1].pace))
        assert until_the_end.tokens == result.tokens
        served.append((steps, counts.tokens / counts.span_s))
        return result, log

    monkeypatch.setattr(real_run, "serve_model", told)
    (tmp_path / "azure_llm_2023_code.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:17:{i:02}.0000000,{3 + 5 * i % 30},{2 + i % 5}\n" for i in range(12))
    )
    given = [*arguments, "--traces", str(tmp_path), "--requests", "8", "--rounds", "2", "--loads", "code x50"]
    given += ["--calibrate", "0.1", "--also", "eager"]
    assert end_to_end.main([*given, "--policies", "auto", "vllm", "auto 1:1:1 paced"]) == 0
    rows = tmp_path / "rows.json"
    assert end_to_end.main(["--summary", arguments[-1], "--json", str(rows)]) == 0
    table = json.loads(rows.read_text())
    assert {(row["policy"], row["figure"], row["repeats"]) for row in table} == {
        (policy, figure, rounds)
        for policy, rounds in (("auto", 2), ("vllm", 2), ("auto 1:1:1 paced", 2), ("eager", 1))
        for figure in end_to_end.BETTER_UP
    }
    assert all(row["ratio_to_vllm_replica"] == 1 for row in table if row["policy"] == "vllm")
    assert all(row["low"] <= row["value"] <= row["high"] for row in table if row["repeats"] > 1)
    assert [pace for spec, pace in paces if spec == "auto 1:1:1 paced"] == ["vllm"] * 2
    assert {pace for spec, pace in paces if spec != "auto 1:1:1 paced"} == {None}
    cells = read(arguments)["cells"]
    assert all(cell["served"] == 8 for cell in cells.values())
    # What a round's own steps are, not all of the process so far.
    assert [(sum(cell["steps"].values()), cell["tokens_per_s_arriving"]) for cell in cells.values()] == served
    assert all(cell["after_arrivals_s"] < cell["span_s"] for cell in cells.values())
    # The replica has vLLM's sizes, which end below this load's prompts, and not those that `auto` has captured.
    assert cells["code x50/0/vllm"]["steps"]["eager"] > 0
    assert cells["code x50/0/auto"]["steps"].get("eager", 0) == 0


def test_policies_of_end_to_end_are_read() -> None:
    """A policy, an objective and 'paced', in that order; anything else says what may be there."""
    for text in ("auto", "auto 1:1:1 paced", "vllm:version=0.33", "auto latency"):
        assert end_to_end.policy_of(text) == text
    for text, message in (
        ("autoo", "did you mean 'auto'"), ("", "unknown policy"), ("auto quick", "objective"),
        ("auto 1:1 packed", "may be 'paced' alone"), ("auto 1:1 paced paced", "may be 'paced' alone"),
    ):  # fmt: skip
        with pytest.raises(argparse.ArgumentTypeError, match=message):
            end_to_end.policy_of(text)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", ""])
def test_rounds_are_counted_from_one(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="give a whole one from 1 up"):
        end_to_end.positive(text)
    assert end_to_end.positive("3") == 3


def test_policies_of_the_first_rounds_alone() -> None:
    """Each round begins with another policy; a round counts without those that it doesn't have."""
    policies = ["auto", "vllm", "eager"]
    assert [end_to_end.in_round(policies, i, ["eager"], 1) for i in range(3)] == [
        ["auto", "vllm", "eager"], ["vllm", "auto"], ["auto", "vllm"],
    ]  # fmt: skip
    cell = {**dict.fromkeys(end_to_end.BETTER_UP, 10.0), "served": 8}
    cells = {f"code x1/{i}/{spec}": cell for i in range(3) for spec in end_to_end.in_round(policies, i, ["eager"], 1)}
    data = {"cells": cells, "model": "m", "rates": {"code x1": 1.0}, "also": {"policies": ["eager"], "rounds": 1}}

    def repeats() -> dict[str, int]:
        return {row["policy"]: row["repeats"] for row in end_to_end.summarise(data)}

    assert repeats() == {"auto": 3, "vllm": 3, "eager": 1}
    del cells["code x1/0/vllm"]
    assert repeats() == {"auto": 2, "vllm": 2}


def test_interrupted_rounds_do_not_count(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is cut off isn't kept; one that an older file has is left out of the table."""
    (tmp_path / "azure_llm_2023_code.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:17:{i:02}.0000000,5,2\n" for i in range(4))
    )
    from kpolicy.serving import real_run

    serve, calls = real_run.serve_model, 0

    def cut_off(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += "label" in named
        result, log = serve(*given, **named)
        return (attrs.evolve(result, interrupted="stopped") if calls == 2 else result), log

    monkeypatch.setattr(real_run, "serve_model", cut_off)
    given = [*arguments, "--traces", str(tmp_path), "--requests", "4", "--rounds", "2", "--loads", "code x50"]
    given += ["--policies", "vllm"]
    with pytest.raises(SystemExit, match="interrupted"):
        end_to_end.main(given)
    assert list(read(arguments)["cells"]) == ["code x50/0/vllm"]
    assert end_to_end.main(given) == 0
    data = read(arguments)
    assert list(data["cells"]) == ["code x50/0/vllm", "code x50/1/vllm"]
    with pytest.raises(SystemExit, match=r"has rounds of 4 requests and --requests is 3; give another --out"):
        end_to_end.main([*given, "--requests", "3"])
    data["cells"]["code x50/1/vllm"]["interrupted"] = "stopped"
    assert {row["repeats"] for row in end_to_end.summarise(data)} == {1}


def test_slices_of_different_models_are_not_added_up(tmp_path: Path) -> None:
    """Nor of different devices or versions; of several days the last one counts."""
    head: dict[str, Any] = {"model": "a", "device": "d", "versions": {"torch": "2.11"}, "cells": {}}
    for name, value in (("model", "b"), ("device", "e"), ("versions", {"torch": "2.13"})):
        (tmp_path / "1.json").write_text(json.dumps(head))
        (tmp_path / "2.json").write_text(json.dumps({**head, name: value}))
        with pytest.raises(SystemExit, match="slices differ"):
            correct.merge([tmp_path / "1.json", tmp_path / "2.json"], tmp_path / "out.json")
        assert not (tmp_path / "out.json").exists()
    for name, date in (("1.json", "2026-11-30"), ("2.json", "2026-11-28")):
        (tmp_path / name).write_text(json.dumps({**head, "date": date}))
    assert slices_of([tmp_path / "1.json", tmp_path / "2.json"])[0]["date"] == "2026-11-30"
    assert slices_of([tmp_path / "2.json", tmp_path / "1.json"])[0]["date"] == "2026-11-30"


def test_the_command_is_the_one_that_ran(tmp_path: Path) -> None:
    """Every option is in it, folders of this machine aren't, and a file that a run went on with has all commands."""
    given = ["--config", str(tmp_path / "qwen" / "config.json"), "--loads", "code x50", "--traces", "../shared/traces"]
    given += [f"--out={tmp_path}/r.json"]
    told = "python -m m --config qwen/config.json --loads 'code x50' --traces ../shared/traces --out=r.json"
    assert command_line("m", given) == told
    path = tmp_path / "r.json"
    for command in ("first", "second", "second"):
        results = Results(path, {"model": "a", "device": "d", "command": command})
        results.write()
    assert (results.data["command"], results.data["commands"]) == ("second", ["first", "second"])


def test_ratios_are_above_1_where_better() -> None:
    """More tokens a second are better, longer times are worse."""
    times = [figure for figure, up in end_to_end.BETTER_UP.items() if not up]
    cells = {
        "code x1/0/auto": {"tokens_per_s": 20.0, **dict.fromkeys(times, 5.0), "served": 9},
        "code x1/0/vllm": {"tokens_per_s": 10.0, **dict.fromkeys(times, 10.0), "served": 8},
    }
    data = {"cells": cells, "model": "m", "rates": {"code x1": 1.0}}
    assert {row["figure"] for row in end_to_end.summarise(data)} == {"tokens_per_s", *times}, "as older files are"
    rows = end_to_end.summarise(data)
    assert all(row["ratio_to_vllm_replica"] == 2 for row in rows if row["policy"] == "auto")
    assert all(row["low"] is None for row in rows), "one repeat has no interval"
    assert {row["policy"]: row["served"] for row in rows} == {"auto": 9, "vllm": 8}
    cells["code x1/0/vllm"]["tokens_per_s"] = 0.0
    over_nothing = [row for row in end_to_end.summarise(data) if row["figure"] == "tokens_per_s"]
    assert [row["ratio_to_vllm_replica"] for row in over_nothing] == [None, None]


def test_rounds_that_a_policy_lacks_do_not_count() -> None:
    """A policy that served alone has nothing to stand beside, on another load of the file either."""
    cell = {**dict.fromkeys(end_to_end.BETTER_UP, 10.0), "served": 8}
    fast = {**cell, "tokens_per_s": 20.0}
    cells = {"code x1/0/auto": fast, "code x1/0/vllm": cell, "code x1/0/eager": cell}
    whole = end_to_end.summarise({"cells": dict(cells), "model": "m", "rates": {"code x1": 1.0}})
    slow = {**cell, "tokens_per_s": 1.0}
    more = {"code x1/1/auto": slow, "code x1/1/vllm": cell, "code x1/1/eager": {**cell, "interrupted": "stopped"},
            "burstgpt x1/0/auto": slow, "burstgpt x1/0/vllm": cell}  # fmt: skip
    data = {"cells": cells | more, "model": "m", "rates": {"code x1": 1.0, "burstgpt x1": 1.0}}
    assert end_to_end.summarise(data) == whole
    assert {row["ratio_to_vllm_replica"] for row in whole if row["policy"] == "auto"} == {1, 2}
    data["cells"]["code x1/1/eager"] = cell
    assert {(row["load"], row["repeats"]) for row in end_to_end.summarise(data)} == {("code x1", 2)}


def test_a_newer_run_of_a_load_stands_for_an_older_one() -> None:
    """With all that it has, of the same model and load; what has no date stays, and stands for nothing."""

    def run(
        date: str | None, *loads: str, rounds: int = 2, model: str = "m", served: int = 8, more: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        cell = {**dict.fromkeys(end_to_end.BETTER_UP, 10.0), "served": served}
        policies = ("auto", "vllm", *more)
        cells = {f"{load}/{i}/{policy}": cell for load in loads for i in range(rounds) for policy in policies}
        dated = {} if date is None else {"date": date}
        return {"cells": cells, "model": model, "rates": dict.fromkeys(loads, 1.0), **dated}

    def kept(*files: dict[str, Any]) -> set[tuple[str, str]]:
        return {(row["date"], row["load"]) for row in end_to_end.table(files)}

    old = run("2026-11-29", "code x1", "burstgpt x1")
    for newer in (
        run("2026-11-30", "code x1"), run("2026-11-30", "code x1", rounds=3),
        run("2026-11-30", "code x1", served=9, more=("eager",)),
    ):  # fmt: skip
        assert kept(old, newer) == kept(newer, old) == {("2026-11-29", "burstgpt x1"), ("2026-11-30", "code x1")}
        assert end_to_end.table([newer, old])[: -2 * len(end_to_end.BETTER_UP)] == end_to_end.summarise(newer)
    both = {("2026-11-29", "code x1"), ("2026-11-29", "burstgpt x1")}
    later = run("2026-11-29", "code x1") | {"costs": {"auto": "measured 2026-11-29T12:00:00+00:00 on a device"}}
    sooner = run("2026-11-29", "code x1") | {"costs": {"auto": "measured 2026-11-29T09:00:00+00:00 on a device"}}
    for files in ([sooner, later], [later, sooner]):
        assert end_to_end.table(files) == end_to_end.summarise(later), "of two runs of one day"
    for other in (
        run("2026-11-30", "code x1", rounds=1), run("2026-11-30", "code x1", model="n"),
        run("2026-11-30", "code x1", served=7),
    ):  # fmt: skip
        assert kept(old, other) == {*both, ("2026-11-30", "code x1")}
    assert kept(old, run("2026-11-30", "code x2")) == {*both, ("2026-11-30", "code x2")}
    wider = run("2026-11-29", "code x1", more=("eager",))
    assert kept(wider, run("2026-11-30", "code x1")) == {("2026-11-29", "code x1"), ("2026-11-30", "code x1")}
    assert kept(old, run("2026-11-29", "code x1")) == both
    assert kept(old, run(None, "code x1")) == {*both, ("unstated", "code x1")}


def test_regret_of_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every legal way and every policy's pick has a cell, and a load a row of each policy and objective."""
    from kpolicy.settings import Settings

    options = argparse.Namespace(device="cpu", tiny=True, kernels="auto")
    model = load_model(QWEN | TOY, options, kv_tokens=1024, max_model_len=96, max_num_reqs=4)
    settings = Settings(max_num_reqs=4, max_num_tokens=32)
    policies = ("auto", "full", "eager")
    engines, _ = open_engines(model, settings, policies, ladder=[4, 8, 16], calibrate_s=0.1)
    engines["auto latency"] = engines["auto"]
    monkeypatch.setattr(regret, "ROUNDS", 1)
    monkeypatch.setattr(regret, "MOST_ROUNDS", 6)
    # Nothing is near enough, so that only picks are run once before they are timed.
    monkeypatch.setattr(regret, "FAR", 0.0)
    ran: Counter[str] = Counter()
    run = engines["auto"].executor.run

    def counted(*step: Any) -> Any:
        # A step that is prepared when it first runs calls it again.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engines["auto"].executor, "run", run)
            ran[regret.name_of(step[0])] += 1
            return run(*step)

    monkeypatch.setattr(engines["auto"].executor, "run", counted)
    found = regret.measure({"decodes": [9, 5], "chunks": [(7, 0)], "steps": 2, "times": 3}, model, engines)
    assert {name: ran[name] - len(cell["us"]) for name, cell in found["cells"].items()} == {
        name: int(name in found["picks"].values()) for name in found["cells"]
    }
    assert set(found["picks"]) == {*policies, "auto latency"}
    assert {name.partition(" ")[0] for name in found["cells"]} == {"full", "piecewise", "split", "eager"}
    assert found["alone_us"]
    assert set(found["picks"].values()) <= found["cells"].keys()
    rows = regret.summarise({"model": "m", "cells": {"code x1/0": found}, "too_long": {"code x1": 5}}, "code x1")
    assert {(row["objective"], row["policy"]) for row in rows} >= {("step_us", "auto"), ("gap_us", "eager")}
    assert all((row["shapes"], row["too_long"], row["rate"]) == (1, 5, 1.0) for row in rows)
    assert all(row["noise_floor"] >= 0 for row in rows)
    monkeypatch.setattr(regret, "MOST_ROUNDS", 10)
    monkeypatch.setattr(regret, "UNSETTLED", math.inf)
    # By what rows score, either objective's floor.
    for floors, rounds in (((0.004, 0.004), regret.SURER_ROUNDS), ((0.03, 0.0), 10), ((0.0, 0.03), 10)):
        least = dict(zip(("step_us", "gap_us"), (100.0 / (1 + floor) for floor in floors), strict=True))
        monkeypatch.setattr(
            regret,
            "_scores",
            lambda _, kind, __, least=least: regret._Scores({"a": 100.0}, "a", least[kind], "a", frozenset()),
        )
        found = regret.measure({"decodes": [9, 5], "chunks": [], "steps": 1, "times": 1}, model, engines)
        assert max(len(cell["us"]) for cell in found["cells"].values()) == rounds


def test_a_shape_that_is_unsure_is_measured_longer() -> None:
    """Its best by one half of the samples is over 2% off the best by the other, by the time that rows score."""
    steady, other, late = [100.0] * 14, [99.0, 103.0] * 7, [150.0, 300.0] * 7

    def of(alone_us: float = 0.0, **cells: list[float]) -> dict[str, Any]:
        found = {name: {"steps": 2, "us": us} for name, us in cells.items()}
        return {"tokens": [4, 16, 40, 200], "cells": found, "alone_us": [alone_us]}

    assert regret._unsure(of(a=steady, b=other), regret.limits_of({}))
    assert not regret._unsure(of(a=steady, b=[101.0] * 14), regret.limits_of({}))
    assert not regret._unsure(of(a=steady, b=[101.0] * 14, c=late), regret.limits_of({})), "late cells have no say"
    # 0.4% of a cycle are 2.7% of 15 us, which is what is left without a decode step of 85.
    near = {"a": [100.0, 100.4] * 3, "b": [100.2, 100.0] * 3}
    assert not regret._unsure(of(**near), regret.limits_of({}), regret._limit(6))
    assert regret._unsure(of(85.0, **near), regret.limits_of({}), regret._limit(6))
    assert regret._unsure(of(85.0, **near), regret.limits_of({}))


@pytest.mark.parametrize(("model", "key"), [("qwen05b", "conversation x1/39"), ("llama8b", "code x6/16")])
def test_shapes_that_were_done_too_soon_would_be_measured_longer(model: str, key: str) -> None:
    """After six samples on 2026-11-28, with a noise floor above 2%."""
    cell = json.loads((RAW / f"regret_{model}.json").read_text())["cells"][key]
    assert max(len(each["us"]) for each in cell["cells"].values()) == 6
    assert regret._unsure(cell, regret.limits_of({}))


@pytest.mark.parametrize(
    ("us", "rounds", "latest", "hopeful"),
    [
        (179.0, 2, 0.0, True), (181.0, 2, 999.0, False), (119.0, 3, 119.0, True), (121.0, 3, 999.0, False),
        (119.0, 3, 118.0, False),
    ],
)  # fmt: skip
def test_ways_are_given_up(us: float, rounds: int, latest: float, hopeful: bool) -> None:
    """At first what takes 1.8 times the best, then 1.2 times, and what comes too late for the first token."""
    one_step = SimpleNamespace(launches=[SimpleNamespace(repeat=1)])
    assert regret._hopeful([us] * rounds, one_step, rounds, best=100.0, latest=latest) is hopeful
    four_steps = SimpleNamespace(launches=[SimpleNamespace(repeat=4)])
    assert regret._hopeful([4 * us] * rounds, four_steps, rounds, best=100.0, latest=4 * latest) is hopeful


def test_shapes_are_sure_of_the_best_sooner_where_halves_agree() -> None:
    """A quarter of the limit is enough after 6 rounds, half of it after 8, the limit itself after 14."""
    assert [regret._limit(rounds) for rounds in (6, 8, 12, 14, 38)] == [0.005, 0.01, 0.01, 0.02, 0.02]


def test_regret_of_some_loads(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the loads asked for are measured, what is there stays when interrupted, and the table is a profile."""
    from kpolicy.profiles import load_profile

    for name, value in (("OWN_SIZES", ()), ("FIXED", ("full",)), ("TINY", (4, 16)), ("MAX_NUM_TOKENS", 16),
                        ("MAX_NUM_REQS", 4), ("KV_TOKENS", 1024), ("LONGEST", 96), ("CALIBRATION_S", 0.1)):  # fmt: skip
        monkeypatch.setattr(regret, name, value)
    shape = {"decodes": [9, 5], "chunks": [(7, 0)], "steps": 1, "times": 3}
    each = {"shapes": [shape, shape], "steps": 9, "too_long": 0}
    shapes, profile = tmp_path / "shapes.json", tmp_path / "profile.json"
    shapes.write_text(json.dumps({"qwen": {"code x1": each, "code x6": each}}))
    given = ["--model", "qwen", "--shapes", str(shapes), "--save-profile", str(profile), *arguments]
    with pytest.raises(SystemExit, match="code x2: the shapes are of code x1, code x6"):
        regret.main([*given, "--loads", "code x2"])
    measure, calls = regret.measure, 0

    def interrupted(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return measure(*given)

    monkeypatch.setattr(regret, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        regret.main([*given, "--loads", "code x6"])
    assert list(read(arguments)["cells"]) == ["code x6/0"]
    assert load_profile(str(profile)).model.startswith("Qwen2ForCausalLM")
    assert read(arguments)["first_token_limit"] == {"step_us": 1.0, "gap_us": 1.25}
    told_limit = "has a first_token_limit of 1 for step_us, 1.25 for gap_us and this run is of 1.5 for step_us, 1.5 for"
    with pytest.raises(SystemExit, match=told_limit):
        regret.main([*given, "--first-token-limit", "1.5"])
    monkeypatch.setattr(regret, "WRITE_S", 0.0)
    assert regret.main([*given, "--loads", "code x1"]) == 0
    told = capsys.readouterr().out
    assert all(part in told for part in ("\n1 of 2 shapes, ", "\n2 of 2 shapes, ", "\n2 shapes, 0 left, ")), told
    with pytest.raises(SystemExit, match="--model llama: the shapes are of qwen"):
        regret.main(["--model", "llama", *given[2:]])
    shapes.write_text(json.dumps({"llama": {"code x1": each}}))
    with pytest.raises(SystemExit, match="has 'qwen' and this run is of 'llama'; give another --out"):
        regret.main(["--model", "llama", *given[2:]])


def test_each_policy_picks_among_its_own_graphs(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's list has a graph of just the batch's tokens, which nobody else's policy takes, `auto` as little."""
    for name, value in (("OWN_SIZES", ("sglang",)), ("FIXED", ("full",)), ("TINY", (1, 16)), ("MAX_NUM_TOKENS", 16),
                        ("MAX_NUM_REQS", 16), ("KV_TOKENS", 512), ("LONGEST", 96), ("CALIBRATION_S", 0.1)):  # fmt: skip
        monkeypatch.setattr(regret, name, value)
    shapes = tmp_path / "shapes.json"
    shape = {"decodes": [9] * 12, "chunks": [], "steps": 1, "times": 3}
    shapes.write_text(json.dumps({"qwen": {"code x1": {"shapes": [shape], "steps": 3, "too_long": 0}}}))
    assert regret.main(["--model", "qwen", "--shapes", str(shapes), *arguments]) == 0
    picks = read(arguments)["cells"]["code x1/0"]["picks"]
    assert "FULL 12t/" in picks["sglang"]
    assert all("FULL 16t/" in pick for name, pick in picks.items() if name != "sglang"), picks


def test_gpt2(tmp_path: Path) -> None:
    """Graphs of both kinds give eager's outputs for prompts and decodes."""
    out = tmp_path / "out.json"
    assert gpt2.main(["--device", "cpu", "--tiny", "--rounds", "1", "--out", str(out)]) == 0
    cells = json.loads(out.read_text())["cells"]
    for cell in cells.values():
        assert cell["ways"].keys() == {"full", "piecewise", "eager"}
        assert all(way["likeliest_tokens_equal"] == 128 for way in cell["ways"].values())


def test_kernels_of_a_step_in_each_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every way of a step has its times and families, once; what wasn't reached is told."""
    out, config = tmp_path / "out.json", tmp_path / "config.json"
    config.write_text(json.dumps(QWEN))
    assert kernels.main(["--config", str(config), "--device", "cpu", "--tiny", "--out", str(out)]) == 0
    cells = json.loads(out.read_text())["cells"]
    assert [name for name in cells if name.startswith("1 decode/")] == [
        "1 decode/full 1", "1 decode/full 4", "1 decode/full 24", "1 decode/piecewise 24", "1 decode/eager",
    ]  # fmt: skip
    for cell in cells.values():
        assert cell["families"]["matrix products"] > 0
        assert {kernels.family_of(name) for name, *_ in cell["longest"]} <= cell["families"].keys()
    # A second call goes on: what is there isn't measured again.
    del cells["1 decode/eager"]
    out.write_text(json.dumps({**json.loads(out.read_text()), "cells": cells}))
    assert kernels.main(["--config", str(config), "--device", "cpu", "--tiny", "--out", str(out)]) == 0
    again = json.loads(out.read_text())["cells"]
    assert again.pop("1 decode/eager")["kernels"] > 0
    assert again == cells
    cells.pop("1 decode/full 1")
    out.write_text(json.dumps({**json.loads(out.read_text()), "cells": cells}))
    capsys.readouterr()
    kernels.main(["--config", str(config), "--device", "cpu", "--tiny", "--out", str(out), "--seconds", "0"])
    assert "2 ways weren't measured for want of time" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("nvjet_tst_128x64_64x8_2x1_v_bz_TNT", "matrix products"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<GroupProblemShape>>", "experts"),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<...>", "attention"),
        ("void at::native::index_elementwise_kernel<128, 4>", "sorting and gathering"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::reduce_kernel<512, 1>", "elementwise and reductions"),
        ("_decode", "attention"), ("_share_out", "attention"), ("_combine", "attention"), ("_write", "attention"),
        ("_expanded_prefill", "attention"),
        ("gemvx::kernel<int, int, __nv_bfloat16>", "matrix products"),
        ("void at::native::vectorized_gather_kernel<16, long>", "sorting and gathering"),
        ("void flashinfer::norm::RMSNormKernel<8u>", "elementwise and reductions"),
        ("void at::elementwise_kernel<128, 4, masked_fill_kernel(IndexToOffset)>", "elementwise and reductions"),
        ("something_new", "other"),
    ],
)  # fmt: skip
def test_a_kernel_counts_with_its_family(name: str, family: str) -> None:
    """By its name, the first pattern that fits."""
    assert kernels.family_of(name) == family


def test_results_are_not_mixed(tmp_path: Path) -> None:
    """A file of another model or device isn't added to; what else it holds stays."""
    path = tmp_path / "r.json"
    first = Results(path, {"model": "a", "device": "d"})
    first.data["rates"] = {"x": 2}
    first.put("one", 1)
    again = Results(path, {"model": "a", "device": "d"})
    assert again.cells == {"one": 1}
    assert again.data["rates"] == {"x": 2}
    with pytest.raises(SystemExit, match="another --out"):
        Results(path, {"model": "b", "device": "d"})


def test_the_interval_of_a_mean() -> None:
    """By Student's t, so that two rounds aren't taken for many."""
    mean, low, high = interval_of_mean([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert high - mean == pytest.approx(mean - low) == pytest.approx(4.303 / 3**0.5)


@pytest.mark.parametrize("load", ["code", "code x", "code x0", "cod x6", "code saturate", "code x6 x1", ""])
def test_end_to_end_refuses_what_is_no_load(load: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before a model is loaded, in one line that says how a load is written."""
    with pytest.raises(SystemExit) as ended:
        end_to_end.main(["--config", str(tmp_path), "--out", str(tmp_path / "out.json"), "--loads", load])
    assert ended.value.code == 2
    assert f"{load!r} is no load" in capsys.readouterr().err
