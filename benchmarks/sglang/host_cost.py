"""Host time of one step's decision: SGLang's own rule out of the wheels, alone and under kpolicy's hooks.

    KPOLICY_ORACLE=FOLDER PYTHONPATH=integrations/kpolicy_sglang python -m benchmarks.sglang.host_cost --date 2026-11-22

The rule is what SGLang asks of each batch: ``rule_us`` is it alone, ``hooked_us`` it under the hooks and their
wrappers, and ``added_us`` the difference, what kpolicy takes. Steps whose eager run is cheaper don't ask SGLang at all.
Of the scheduler's rows ``rule_us`` is an empty function, and a cycle is the mean of those that take turns, but where
a row says that it is the prompts' alone. With
``--before FOLDER`` the kpolicy_sglang of another tree is measured in turns with this one, in ``before_us``.

Processor time, the least of many turns: what else runs on the machine only adds.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

import kpolicy
from kpolicy.costs import Curve
from kpolicy.settings import Objective
from kpolicy_sglang import dispatch, hooks
from kpolicy_sglang.config import Config
from kpolicy_sglang.phase import DECODE, PREFILL, Phase, table_of
from kpolicy_sglang.split import Split, split_of
from kpolicy_sglang.state import State, attach
from tests.integrations.sglang.test_oracle import Older, _older_prefill
from tests.oracle.sglang_real import Release, decode_runner, prefill_runner

RESULT = Path(__file__).parents[1] / "results" / "sglang_host_cost.json"
CALLS, TURNS, ROUNDS = 2_000, 15, 3


def wrapped(original: Any, hook: Any) -> Any:
    """An AROUND hook as SGLang's registry puts it."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return wrapper


def decode(release: Release, size: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A decode batch of 0.5.23."""
    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 768)
    runner = decode_runner(release)()
    runner.__dict__.update(
        ragged_verify_mode=False, captured_req_width=1, require_mlp_tp_gather=False, require_mlp_sync=False,
        enable_pdmux=False, disable_padding=False, backend=None, max_bs=768, is_encoder_decoder=False,
        enable_two_batch_overlap=False, capture_hidden_mode=0,
        model_runner=SimpleNamespace(spec_algorithm=SimpleNamespace(is_ngram=lambda: False)),
    )  # fmt: skip
    phase = Phase(DECODE, sizes, 768, full=True)
    phase.install("auto", table_of("bench", {each: 1500 + each for each in sizes}, {1: 11_000}), Objective())
    setattr(runner, dispatch.ATTRIBUTE, phase)
    batch = SimpleNamespace(replace_embeds=None, spec_info=None, batch_size=size, global_num_tokens_cpu=None)
    own = type(runner).can_run_graph
    hooked = wrapped(own, dispatch.decode_can_run)
    return lambda: own(runner, batch), lambda: hooked(runner, batch)


def _prefill_phase(runner: Any) -> Phase:
    sizes = (64, 96, 128, 256, 512, 576, 1024, 1536, 2048)
    runner.__dict__.update(max_num_tokens=2048, capture_num_tokens=list(sizes), capture_hidden_mode=0)
    phase = Phase(PREFILL, sizes, 8192, full=False)
    phase.install("auto", table_of("bench", {each: 4300 + each for each in sizes}, {1: 6_000}), Objective())
    setattr(runner, dispatch.ATTRIBUTE, phase)
    return phase


def nothing(original: Any, *args: Any, **kwargs: Any) -> Any:
    """An AROUND hook that only asks SGLang."""
    return original(*args, **kwargs)


def prefill(release: Release, tokens: int, *, idle: bool = False) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A prefill batch of 0.5.23: its whole rule, with the rank-local part hooked too; idle hooks do nothing."""
    asked, decided = (nothing, nothing) if idle else (dispatch.prefill_can_replay_locally, dispatch.prefill_can_run)
    rule: Any = prefill_runner(release, cuda=True, whole=True)
    own_local, own = rule.can_replay_locally, rule.can_run_graph
    ours = type("Hooked", (rule,), {"can_replay_locally": wrapped(own_local, asked)})
    hooked = wrapped(own, decided)
    batch = SimpleNamespace(
        batch_size=1, input_ids=torch.zeros(tokens, dtype=torch.int64), input_embeds=None, replace_embeds=None,
        extend_prefix_lens_cpu=[0], forward_mode=SimpleNamespace(is_target_verify=lambda: False),
        capture_hidden_mode=0, return_logprob=False, contains_mm_inputs=lambda: False, global_num_tokens_cpu=None,
    )  # fmt: skip
    stock, runner = _prefill_runner(rule), _prefill_runner(ours)
    _prefill_phase(runner)
    return lambda: own(stock, batch), lambda: hooked(runner, batch)


def _prefill_runner(rule: type) -> Any:
    runner = rule()
    runner.__dict__.update(
        _qwen_bcg_hc_sidechannel=False, _qwen_bcg_mtp_draft=False, _is_full_backend=False, _fa4_prefill=False,
        _capture_req_slots=1, _captured_attn_metadata_max_bs=None, prefer_eager_mixed_prefill=False,
        prefill_backend_name="breakable", has_mha_companion_layers=False, _attn_backend_is_dsa=False,
        _capture_chunked_prefix=False, max_context_size=None, max_seq_len=None,
    )  # fmt: skip
    runner.__dict__.update(
        max_num_tokens=2048, capture_num_tokens=[64, 96, 128, 256, 512, 576, 1024, 1536, 2048], capture_hidden_mode=0,
        enable_lora=False, _backend_can_run_prefill_cuda_graph=None,
    )  # fmt: skip
    return runner


def older_prefill(release: Release, tokens: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A prefill batch of 0.5.16."""
    runner = _older_prefill(release)()  # type: ignore[no-untyped-call]
    runner.__dict__.update(
        _is_full_backend=False, _capture_req_slots=1, prefill_backend_name="breakable", has_mha_companion_layers=False
    )
    _prefill_phase(runner)
    batch = SimpleNamespace(
        batch_size=1, input_embeds=None, replace_embeds=None, extend_prefix_lens_cpu=[0], capture_hidden_mode=0,
        forward_mode=SimpleNamespace(is_target_verify=lambda: False), global_num_tokens_cpu=None, return_logprob=False,
        input_ids=torch.zeros(tokens, dtype=torch.int64),
    )  # fmt: skip
    own = type(runner).can_run_graph
    hooked = wrapped(own, dispatch.prefill_can_run_0_5_16)
    return lambda: own(runner, batch), lambda: hooked(runner, batch)


USUAL, LONG, MANY = 500, 4000, (512,) * 16


class Queue(NamedTuple):
    """What waits when a batch of prompts is made, and what SGLang runs of it.

    Args:
        waiting: tokens of the prompts in the queue.
        runs: tokens of those that run.
        cut: tokens of the prompt under way, and how many of them ran before.
    """

    waiting: tuple[int, ...]
    runs: tuple[int, ...] = MANY
    cut: tuple[int, int] | None = None


IN_THE_MIDDLE = (USUAL,) * 4 + (LONG,) + (USUAL,) * 3
QUEUES = {
    "nothing waits": (Queue(()),),
    "1 prompt waits, turns": (Queue((2 * USUAL,)),),
    **{f"{count} prompts wait, turns": (Queue((USUAL,) * count),) for count in (4, 16)},
    # A batch ends before the long prompt, which comes first in the next.
    "8 prompts wait, one long, turns": (
        Queue(IN_THE_MIDDLE, (USUAL,) * 4),
        Queue((LONG,) + (USUAL,) * 7, (LONG, USUAL, USUAL)),
    ),
    "8 prompts wait, one long, behind one under way, turns": (
        Queue(IN_THE_MIDDLE, (2000,) + (USUAL,) * 4, cut=(LONG, 2000)),
    ),
    **{f"{count} prompts wait, burst": (Queue((USUAL,) * count),) for count in (80, 300)},
}
WHERE = ", in the middle", ", first"


def scheduler(*queues: Queue, follow: bool = True) -> tuple[Callable[[], Any], Callable[[], Any], Split]:
    """A cycle of the scheduler while 300 decodes run, in turns with prompts where some wait, and what decides it.

    Each queue is there for two cycles, a decode step's and that of its prompts, and other requests wait behind them,
    so that nothing is known of before but what a decode step leaves as it was. A burst goes on for ever.

    Args:
        queues: what waits, one after the other.
        follow: whether other requests follow; otherwise the first queue stays.
    """
    state = State(Config(), "0.5.16")
    for name, sizes, full in ((DECODE, (1, 64, 256, 600), True), (PREFILL, (64, 512, 1024, 2048, 4096, 8192), False)):
        phase = state.phases[name] = Phase(name, sizes, sizes[-1], full=full)
        us = {size: 1000.0 + 3.7 * size for size in sizes}
        phase.install("auto", table_of("bench", us, {size: 2 * each for size, each in us.items()}), Objective())
    if any(LONG in queue.waiting for queue in queues):
        state.long, state.beside = Curve((2048, 8192), (9_000.0, 60_000.0)), 1.0
    runner = SimpleNamespace()
    attach(runner, state)
    made = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=runner), chunked_prefill_size=8192, max_running_requests=600,
        is_mixed_chunk=False,
    )  # fmt: skip
    # Twice, so that other requests follow where there is one queue.
    ready = [_waiting(queue) for _ in range(2) for queue in queues]
    following = itertools.cycle([each for each in ready for _ in range(2)] if follow else ready[:1])
    running = SimpleNamespace(reqs=[0] * 300)

    def advance() -> None:
        made.waiting_queue, made.chunked_req, made.plan = next(following)

    def own(scheduler: Any, running_batch: Any) -> Any:  # noqa: ARG001
        scheduler.chunked_req = None
        return scheduler.plan

    def stock() -> Any:
        advance()
        return own(made, running)

    def hooked() -> Any:
        advance()
        return hooks.new_batch_prefill(own, made, running)

    made.waiting_queue, made.chunked_req, made.plan = ready[0]
    split = split_of(made)
    assert split is not None
    split._plan = lambda **_: made.plan
    # The first cycle is a batch of prompts.
    hooks.new_batch_prefill(own, made, running)
    return stock, hooked, split


def _waiting(queue: Queue) -> tuple[list[Any], Any, Any]:
    """A queue of requests, the prompt under way, and the plan with the batch that runs of them."""

    def request(tokens: int, done: int = 0) -> Any:
        return SimpleNamespace(origin_input_ids=range(tokens), prefix_len=done)

    before = [queue.cut[1] if queue.cut and not at else 0 for at in range(len(queue.runs))]
    batch = SimpleNamespace(extend_num_tokens=sum(queue.runs), extend_lens=list(queue.runs), prefix_lens=before)
    cut = request(*queue.cut) if queue.cut else None
    return [request(tokens) for tokens in queue.waiting], cut, SimpleNamespace(batch_to_run=batch)


def prompts_alone(queue: Queue) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Of the two cycles that take turns the one that runs prompts, as after a decode step."""
    stock, hooked, split = scheduler(queue, follow=False)
    decoded = split.turns.decoded
    # The decode step's cycle, from which the queue is known.
    hooked()
    return lambda: (stock(), decoded()), lambda: (hooked(), decoded())


def _happened(step: str, split: Split) -> None:
    """Check that what was timed is what its row says.

    Raises:
        RuntimeError: decodes and prompts had no turns, or had them where it is a burst or nothing waits.
    """
    turns = CALLS * TURNS // 2 if step.endswith("turns") else 0
    if split.turns.in_burst != step.endswith("burst") or split.cycles["in turns"] != turns:
        burst = "in" if split.turns.in_burst else "outside"
        raise RuntimeError(f"{step!r} had {split.cycles['in turns']} turns of decodes for {turns}, {burst} a burst")


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


def rows() -> list[dict[str, Any]]:
    """Every case once."""
    folder = Path(os.environ["KPOLICY_ORACLE"])
    newest, older = Release(folder), Older(folder)
    cases = [
        ("0.5.23", "decode 600, replays", decode(newest, 600)),
        ("0.5.23", "prefill 300, hooks that do nothing", prefill(newest, 300, idle=True)),
        ("0.5.23", "prefill 300, replays", prefill(newest, 300)),
        ("0.5.23", "prefill 1,600, eager by cost", prefill(newest, 1600)),
        ("0.5.16", "prefill 300, replays", older_prefill(older, 300)),
        ("0.5.16", "prefill 1,600, eager by cost", older_prefill(older, 1600)),
    ]
    found = []
    for version, step, pair in cases:
        found.append(_row(version, step, *pair))
    for step, queues in QUEUES.items():
        stock, hooked, split = scheduler(*queues)
        found.append(_row("both", f"scheduler, {step}", stock, hooked))
        _happened(step, split)
        if step.endswith("turns"):
            found += [
                _row("both", f"scheduler, {step}, prompts' cycle alone{name}", *prompts_alone(queue))
                for queue, name in zip(queues, ("",) if len(queues) == 1 else WHERE, strict=True)
            ]
    return found


def _row(version: str, step: str, stock: Callable[[], Any], hooked: Callable[[], Any]) -> dict[str, Any]:
    """What a step takes without the hooks and with them."""
    rule_us, hooked_us = measure(stock, hooked)
    return {"sglang": version, "step": step, "rule_us": rule_us, "hooked_us": hooked_us}


def _least(found: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The least of each time."""
    return [
        {**each[0], **{name: min(row[name] for row in each) for name in ("rule_us", "hooked_us")}}
        for each in zip(*found, strict=True)
    ]


def _of(tree: Path) -> list[dict[str, Any]]:
    """The rows by the kpolicy_sglang of a tree, in a process of its own."""
    paths = [str(tree / "integrations" / "kpolicy_sglang"), str(Path.cwd())]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.sglang.host_cost", "--rows"], check=True, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    listed: list[dict[str, Any]] = json.loads(done.stdout)
    return listed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--date", help="written into the result")
    parser.add_argument("--before", type=Path, help="a tree of before, measured in turns with this one")
    parser.add_argument("--rows", action="store_true", help="only print the times of one round")
    given = parser.parse_args()
    if given.rows:
        print(json.dumps(rows()))
        return 0
    if given.date is None:
        parser.error("--date says when this was measured: give YYYY-MM-DD")
    trees = [Path.cwd(), *([given.before] if given.before else [])]
    found: list[list[list[dict[str, Any]]]] = [[] for _ in trees]
    for turn in range(ROUNDS):
        for which in sorted(range(len(trees)), reverse=bool(turn % 2)):
            found[which].append(_of(trees[which]))
    ours = _least(found[0])
    before = _least(found[1]) if given.before else [None] * len(ours)
    written = []
    for row, old in zip(ours, before, strict=True):
        added = row["hooked_us"] - row["rule_us"]
        shown = {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}
        written.append({**shown, "added_us": round(added, 3)})
        if old is not None:
            written[-1]["before_us"] = round(old["hooked_us"] - old["rule_us"], 3)
        print(*written[-1].values(), sep="\t", flush=True)
    result = {
        "what": "host time of a step's decision: SGLang's own rule, alone and under kpolicy's hooks, on one CPU; "
        "the scheduler's rows have an empty function for a rule",
        "date": given.date,
        "command": "KPOLICY_ORACLE=FOLDER PYTHONPATH=integrations/kpolicy_sglang python -m benchmarks.sglang.host_cost "
        f"--date {given.date}" + (" --before FOLDER" if given.before else ""),
        "versions": {"kpolicy": kpolicy.__version__, "python": platform.python_version(), "torch": torch.__version__},
        "cpu": platform.processor() or platform.machine(), "rows": written,
    }  # fmt: skip
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
