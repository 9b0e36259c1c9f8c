"""Host time of one step's decision: SGLang's own rule out of the wheels, alone and under kpolicy's hooks.

    KPOLICY_ORACLE=FOLDER PYTHONPATH=integrations/kpolicy_sglang python -m benchmarks.sglang.host_cost --date 2026-11-22

The rule is what SGLang asks of each batch: ``rule_us`` is it alone, ``hooked_us`` it under the hooks and their
wrappers, and ``added_us`` the difference, what kpolicy takes. Steps whose eager run is cheaper don't ask SGLang at all.
Of the scheduler's rows ``rule_us`` is an empty function: see `benchmarks.sglang.host_cycles`. ``steps`` has both of a
step together, what its cycle takes and its question, and that as a part of SGLang's own question of prompts. With
``--before FOLDER`` the kpolicy_sglang of another tree is measured in turns with this one, in ``before_us``. 0.5.16's
hooks on a graph's inputs are around empty functions too, and so is what counts a replay; ``--add inputs`` measures
those rows alone, and puts them into the result that is there.

Processor time, the least of many turns: what else runs on the machine only adds. Each case has a process of its own, as
a server has one scheduler. So often in a row all that a call touches is in the processor's caches. Between two steps an
engine touches more than they hold: ``--cold`` has 64 MiB written to between any two calls, takes the median of single
calls, and puts the rows beside the others, as ``cold``. That is more than an engine touches: a step lies between both.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import kpolicy
from benchmarks.command import commit_of
from benchmarks.sglang.host_cycles import CYCLES, cycle, wrapped
from kpolicy.settings import Objective
from kpolicy_sglang import dispatch, hooks, padding
from kpolicy_sglang.config import Config
from kpolicy_sglang.failures import Failures
from kpolicy_sglang.phase import DECODE, PREFILL, Phase, table_of
from kpolicy_sglang.state import State, attach
from kpolicy_sglang.versions import KNOWN
from tests.integrations.sglang.test_oracle import Older, _older_prefill
from tests.integrations.sglang.test_oracle_padding import batch_of, buffers_of, runner_of
from tests.oracle.sglang_real import Release, decode_runner, prefill_runner

RESULT = Path(__file__).parents[1] / "results" / "sglang_host_cost.json"
DECODES, PROMPTS, SCHEDULER = "decode 600, replays", "prefill 300, replays", "scheduler, "
INPUTS, BATCHES = "inputs of a graph of 16, ", {"12 decodes": 12, "16 decodes": 16}
REPLAY = "a decode graph's replay"
_COPY = "_grouped_foreach_copy_"
CALLS, TURNS, ROUNDS = 2_000, 15, 3
COLD_CALLS, COLD_BYTES = 101, 64 << 20
COLD_STEPS = (DECODES, PROMPTS, f"{SCHEDULER}decode, nothing waits", f"{SCHEDULER}decode, 4 wait", INPUTS, REPLAY)
"""How the rows begin that are measured with cold caches: what steps have that nothing is decided in, and one turn."""


DECODE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 768)
PROMPT_SIZES = (64, 96, 128, 256, 512, 576, 1024, 1536, 2048)


def wheels() -> Path:
    """The folder with SGLang's wheels.

    Raises:
        SystemExit: nobody says which it is.
    """
    folder = os.environ.get("KPOLICY_ORACLE")
    if not folder:
        raise SystemExit("KPOLICY_ORACLE isn't set: name the folder with SGLang's wheels, which make oracle downloads.")
    return Path(folder)


def decode(release: Release, size: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A decode batch of 0.5.23."""
    phase = Phase(DECODE, DECODE_SIZES, 768, full=True)
    phase.install("auto", table_of("bench", {each: 1500 + each for each in DECODE_SIZES}, {1: 11_000}), Objective())
    stock, runner = decode_runners(release, phase)
    batch = decode_batch(size)
    return lambda: stock.can_run_graph(batch), lambda: runner.can_run_graph(batch)


def decode_batch(size: int) -> Any:
    """What both releases' runners are asked of so many decodes."""
    return SimpleNamespace(
        replace_embeds=None, spec_info=None, batch_size=size, global_num_tokens_cpu=None, capture_hidden_mode=0
    )


def decode_runners(release: Release, phase: Phase) -> tuple[Any, Any]:
    """A release's runner of decodes, and one that asks a phase first."""
    rule: Any = decode_runner(release)
    stock, runner = rule(), _hooked(rule, can_run_graph=dispatch.decode_can_run)()
    for each in (stock, runner):
        each.__dict__.update(
            ragged_verify_mode=False, captured_req_width=1, require_mlp_tp_gather=False, require_mlp_sync=False,
            enable_pdmux=False, disable_padding=False, backend=None, max_bs=phase.largest, is_encoder_decoder=False,
            enable_two_batch_overlap=False, capture_hidden_mode=0,
            model_runner=SimpleNamespace(spec_algorithm=SimpleNamespace(is_ngram=lambda: False)),
        )  # fmt: skip
    hooks._attach(State(Config(), "0.5.23"), runner, phase)
    return stock, runner


def _hooked(rule: type, **around: Any) -> type:
    """A class of SGLang's with hooks on its methods."""
    return type("Hooked", (rule,), {name: wrapped(getattr(rule, name), hook) for name, hook in around.items()})


def _prompt_phase() -> Phase:
    phase = Phase(PREFILL, PROMPT_SIZES, 8192, full=False)
    phase.install("auto", table_of("bench", {each: 4300 + each for each in PROMPT_SIZES}, {1: 6_000}), Objective())
    return phase


def nothing(original: Any, *args: Any, **kwargs: Any) -> Any:
    """An AROUND hook that only asks SGLang."""
    return original(*args, **kwargs)


def prefill(release: Release, tokens: int, *, idle: bool = False) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A prefill batch of 0.5.23: its whole rule, with the rank-local part hooked too; idle hooks do nothing."""
    stock, runner = prompt_runners(release, _prompt_phase(), idle=idle)
    batch = prompt_batch(tokens)
    return lambda: stock.can_run_graph(batch), lambda: runner.can_run_graph(batch)


def prompt_batch(tokens: int) -> Any:
    """What either release's runner is asked of so many prompt tokens."""
    return SimpleNamespace(
        batch_size=1, input_ids=torch.zeros(tokens, dtype=torch.int64), input_embeds=None, replace_embeds=None,
        extend_prefix_lens_cpu=[0], forward_mode=SimpleNamespace(is_target_verify=lambda: False),
        capture_hidden_mode=0, return_logprob=False, contains_mm_inputs=lambda: False, global_num_tokens_cpu=None,
    )  # fmt: skip


def prompt_runners(release: Release, phase: Phase, *, idle: bool = False) -> tuple[Any, Any]:
    """0.5.23's runner of prompts, and one that asks a phase first."""
    asked, decided = (nothing, nothing) if idle else (dispatch.prefill_can_replay_locally, dispatch.prefill_can_run)
    rule: Any = prefill_runner(release, cuda=True, whole=True)
    ours = _hooked(rule, can_replay_locally=asked, can_run_graph=decided)
    stock, runner = rule(), ours()
    for each in (stock, runner):
        each.__dict__.update(
            _qwen_bcg_hc_sidechannel=False, _qwen_bcg_mtp_draft=False, _is_full_backend=False, _fa4_prefill=False,
            _capture_req_slots=1, _captured_attn_metadata_max_bs=None, prefer_eager_mixed_prefill=False,
            prefill_backend_name="breakable", has_mha_companion_layers=False, _attn_backend_is_dsa=False,
            _capture_chunked_prefix=False, max_context_size=None, max_seq_len=None, enable_lora=False,
            _backend_can_run_prefill_cuda_graph=None,
        )  # fmt: skip
    return _attached(phase, stock, runner)


def older_prefill(release: Release, tokens: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A prefill batch of 0.5.16."""
    stock, runner = older_prompt_runners(release, _prompt_phase())
    batch = prompt_batch(tokens)
    return lambda: stock.can_run_graph(batch), lambda: runner.can_run_graph(batch)


def older_prompt_runners(release: Release, phase: Phase) -> tuple[Any, Any]:
    """The same of 0.5.16."""
    rule = _older_prefill(release)  # type: ignore[no-untyped-call]
    stock, runner = rule(), _hooked(rule, can_run_graph=dispatch.prefill_can_run_0_5_16)()
    for each in (stock, runner):
        each.__dict__.update(
            _is_full_backend=False, _capture_req_slots=1, prefill_backend_name="breakable",
            has_mha_companion_layers=False,
        )  # fmt: skip
    return _attached(phase, stock, runner)


def _attached(phase: Phase, stock: Any, runner: Any) -> tuple[Any, Any]:
    """Both with a phase's sizes, one of them with the phase."""
    for each in (stock, runner):
        each.__dict__.update(max_num_tokens=phase.largest, capture_num_tokens=list(phase.sizes), capture_hidden_mode=0)
    hooks._attach(State(Config(), "0.5.23"), runner, phase)
    return stock, runner


def fill_from(
    self: Any, forward_batch: Any, *, raw_bs: int, padded_bs: int, raw_num_tokens: int,  # noqa: ARG001
    padded_num_tokens: int, pp_proxy_tensors: Any = None,  # noqa: ARG001
) -> None:  # fmt: skip
    """SGLang's, as far as it finds the copy among the names of its module; nothing is copied."""
    _grouped_foreach_copy_([], [])


def _grouped_foreach_copy_(dsts: list[Any], srcs: list[Any]) -> None:
    pass


def inputs(rows: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The inputs of 0.5.16's graph of 16 decodes: nothing is copied, what a copy would take along is found."""
    around = {hook.target.rpartition(".")[2]: hook.around for hook in KNOWN["0.5.16"].hooks}
    if _COPY in around:
        globals()[_COPY] = wrapped(globals()[_COPY], around[_COPY])
    sizes = {"raw_bs": rows, "padded_bs": 16, "raw_num_tokens": rows, "padded_num_tokens": 16, "pp_proxy_tensors": None}
    batch = batch_of(torch.Generator().manual_seed(1), rows, rows, kinds=False)  # type: ignore[no-untyped-call]
    with buffers_of("0.5.16") as module:
        registry = runner_of(module, "decode").buffer_registry  # type: ignore[no-untyped-call]
        stock = copy(registry)
        stock.__class__ = type("Registry", (type(registry),), {"fill_from": fill_from})
        registry.__class__ = _hooked(type(stock), fill_from=around["fill_from"])
        padding.take_tails(SimpleNamespace(buffer_registry=registry, require_gathered_buffer=False), Failures())
    return lambda: stock.fill_from(batch, **sizes), lambda: registry.fill_from(batch, **sizes)


@dataclass(frozen=True)
class Shape:
    """What SGLang knows a graph by, of fields and a hash such as its own."""

    size: int
    stream_idx: int | None = None
    variant_label: str | None = None


class FullCudaGraphBackend:
    """SGLang's backend, as far as it looks up what it replays."""

    def __init__(self) -> None:
        self.graphs: dict[Shape, Any] = {}

    def capture_one(self, shape: Shape, forward: Any) -> None:
        self.graphs[shape] = forward

    def replay(self, shape: Shape, batch: Any) -> Any:  # noqa: ARG002
        return self.graphs[shape]

    def cleanup(self) -> None:
        self.graphs.clear()


def replay() -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A replay of a graph that is in the registry, while SGLang serves."""
    state = State(Config(quick_capture=False), "0.5.16")
    state.serving.append(True)
    model_runner = SimpleNamespace()
    attach(model_runner, state)
    runner = SimpleNamespace(model_runner=model_runner, capture_bs=[16, 32], captured_req_width=1)
    stock, ours = FullCudaGraphBackend(), hooks.decode_backend(lambda _: FullCudaGraphBackend(), runner)
    for each in (stock, ours):
        for size in runner.capture_bs:
            each.capture_one(Shape(size), None)
    return lambda: stock.replay(Shape(16), None), lambda: ours.replay(Shape(16), None)


def cold(stock: Callable[[], Any], hooked: Callable[[], Any]) -> tuple[float, float]:
    """Median microseconds of one call of each whose memory is in no cache, alternating."""
    touched = torch.zeros(COLD_BYTES, dtype=torch.uint8)
    found: tuple[list[int], list[int]] = [], []
    for call in (stock, hooked) * CALLS:
        call()
    gc.disable()
    try:
        for turn in range(COLD_CALLS):
            for which in (0, 1) if turn % 2 else (1, 0):
                call = (stock, hooked)[which]
                touched.add_(1)
                started = time.perf_counter_ns()
                call()
                found[which].append(time.perf_counter_ns() - started)
    finally:
        gc.enable()
    return statistics.median(found[0]) / 1e3, statistics.median(found[1]) / 1e3


def measure(stock: Callable[[], Any], hooked: Callable[[], Any]) -> tuple[float, float]:
    """Microseconds of processor time a call of each, alternating; the least of the turns."""
    least = [math.inf, math.inf]
    for turn in range(TURNS):
        for which in (0, 1) if turn % 2 else (1, 0):
            call = (stock, hooked)[which]
            started = time.thread_time()
            for _ in range(CALLS):
                call()
            least[which] = min(least[which], (time.thread_time() - started) / CALLS * 1e6)
    return least[0], least[1]


def in_a_child(measured: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    """What is measured in a child of this process, which has run nothing else.

    Python notes at each place of its code what objects it saw there. A server has one scheduler; one process for all
    cases has had 70, and its places are slower for it.

    Raises:
        RuntimeError: the child ended without an answer; it has said why.
    """
    forked = get_context("fork")
    receiving, sending = forked.Pipe(duplex=False)
    child = forked.Process(target=lambda: sending.send(measured()))
    child.start()
    sending.close()
    try:
        found: tuple[float, float] = receiving.recv()
    except EOFError:
        raise RuntimeError("a case wasn't measured") from None
    finally:
        child.join()
    return found


def rows(only: str = "", *, in_no_cache: bool = False) -> list[dict[str, Any]]:
    """Every case once, or those whose step begins so; with cold caches those of `COLD_STEPS`."""
    folder = wheels()
    newest, older = Release(folder), Older(folder)
    cases: list[tuple[str, str, Callable[[], tuple[Callable[[], Any], Callable[[], Any]]]]] = [
        ("0.5.23", DECODES, lambda: decode(newest, 600)),
        ("0.5.23", "prefill 300, hooks that do nothing", lambda: prefill(newest, 300, idle=True)),
        ("0.5.23", PROMPTS, lambda: prefill(newest, 300)),
        ("0.5.23", "prefill 1,600, eager by cost", lambda: prefill(newest, 1600)),
        ("0.5.16", PROMPTS, lambda: older_prefill(older, 300)),
        ("0.5.16", "prefill 1,600, eager by cost", lambda: older_prefill(older, 1600)),
    ]
    for version in ("0.5.23", "0.5.16"):
        cases += [(version, f"{SCHEDULER}{name}", partial(cycle, name, version)) for name in CYCLES]
    cases += [("0.5.16", f"{INPUTS}{name}", partial(inputs, count)) for name, count in BATCHES.items()]
    cases.append(("0.5.16", REPLAY, replay))
    begins = COLD_STEPS if in_no_cache else ""
    take = cold if in_no_cache else measure
    return [
        _row(version, step, *in_a_child(lambda made=made: take(*made())))
        for version, step, made in cases
        if step.startswith(only) and step.startswith(begins)
    ]


def steps(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What kpolicy adds to each step in all, its cycle and its question, and as a part of SGLang's question of prompts.

    0.5.16's question of decodes isn't timed, and is taken to be 0.5.23's: the hook is the same.
    """
    added = {(row["sglang"], row["step"]): row["hooked_us"] - row["rule_us"] for row in found}
    rule = {row["sglang"]: row["rule_us"] for row in found if row["step"] == PROMPTS}
    listed = []
    for (version, step), cycle_us in added.items():
        if step.startswith(SCHEDULER):
            asks = {"decode": added["0.5.23", DECODES], "prompts": added[version, PROMPTS]}
            name = step.removeprefix(SCHEDULER)
            kind = name.split(",")[0]
            us = cycle_us + (asks[kind] if kind in asks else sum(asks.values()) / 2)
            listed.append({"sglang": version, "step": name, "us": us, "of_rule": us / rule[version]})
    return listed


def _row(version: str, step: str, rule_us: float, hooked_us: float) -> dict[str, Any]:
    """What a step takes without the hooks and with them."""
    return {"sglang": version, "step": step, "rule_us": rule_us, "hooked_us": hooked_us}


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}


def _least(found: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The least of each time."""
    return [
        {**each[0], **{name: min(row[name] for row in each) for name in ("rule_us", "hooked_us")}}
        for each in zip(*found, strict=True)
    ]


def _of(tree: Path, only: str, *, in_no_cache: bool) -> list[dict[str, Any]]:
    """The rows by the kpolicy_sglang of a tree, in a process of its own: all, or those whose step begins so."""
    paths = [str(tree / "integrations" / "kpolicy_sglang"), str(Path.cwd())]
    command = [sys.executable, "-m", "benchmarks.sglang.host_cost", "--rows", "--add", only]
    done = subprocess.run(
        [*command, *(["--cold"] if in_no_cache else [])], check=True, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    listed: list[dict[str, Any]] = json.loads(done.stdout)
    return listed


def _command(given: argparse.Namespace) -> str:
    more = (" --cold" if given.cold else "") + (" --before FOLDER" if given.before else "")
    return (
        "KPOLICY_ORACLE=FOLDER PYTHONPATH=integrations/kpolicy_sglang python -m benchmarks.sglang.host_cost "
        f"--date {given.date}{more}"
    )


def _made(given: argparse.Namespace) -> dict[str, str]:
    """How a result is made: the day, the commits that run, the command."""
    before = {"before": commit_of(given.before)} if given.before else {}
    return {"date": given.date, "commit": commit_of(), **before, "command": _command(given)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--date", help="written into the result")
    parser.add_argument("--before", type=Path, help="a tree of before, measured in turns with this one")
    parser.add_argument("--add", default="", help="only the rows that begin so, for the result that there is: inputs")
    parser.add_argument("--cold", action="store_true", help="single calls whose memory is in no cache, as `cold`")
    parser.add_argument("--rows", action="store_true", help="only print the times of one round")
    given = parser.parse_args()
    if given.rows:
        print(json.dumps(rows(given.add, in_no_cache=given.cold)))
        return 0
    if given.date is None:
        parser.error("--date says when this was measured: give YYYY-MM-DD")
    made = _made(given)
    trees = [Path.cwd(), *([given.before] if given.before else [])]
    found: list[list[list[dict[str, Any]]]] = [[] for _ in trees]
    for turn in range(ROUNDS):
        for which in sorted(range(len(trees)), reverse=bool(turn % 2)):
            found[which].append(_of(trees[which], given.add, in_no_cache=given.cold))
    ours = _least(found[0])
    before = _least(found[1]) if given.before else []
    written = []
    for row, old in itertools.zip_longest(ours, before):
        written.append(_rounded({**row, "added_us": row["hooked_us"] - row["rule_us"]}))
        if old is not None:
            written[-1]["before_us"] = round(old["hooked_us"] - old["rule_us"], 3)
        print(*written[-1].values(), sep="\t", flush=True)
    if given.cold:
        result = json.loads(RESULT.read_text(encoding="utf-8"))
        result["cold"] = {**made, "bytes_between": COLD_BYTES, "rows": written}
        RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        return 0
    if given.add:
        result = json.loads(RESULT.read_text(encoding="utf-8"))
        kept = [row for row in result["rows"] if not row["step"].startswith(given.add)]
        result["rows"] = [*kept, *({**row, "date": made["date"], "commit": made["commit"]} for row in written)]
        RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        return 0
    listed = [_rounded(each) for each in steps(ours)]
    if given.before:
        for each, old in zip(listed, steps(before), strict=True):
            each["before_us"] = round(old["us"], 3)
    for each in listed:
        print(*each.values(), sep="\t")
    result = {
        "what": "host time of a step's decision: SGLang's own rule, alone and under kpolicy's hooks, on one CPU; "
        "the scheduler's rows have an empty function for a rule; steps are both together",
        **made,
        "versions": {"kpolicy": kpolicy.__version__, "python": platform.python_version(), "torch": torch.__version__},
        "cpu": platform.processor() or platform.machine(), "rows": written,
        "steps": listed,
    }  # fmt: skip
    # Measured by themselves, each with its date.
    there = json.loads(RESULT.read_text(encoding="utf-8"))
    result.update({name: there[name] for name in ("cold", "served") if name in there})
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
