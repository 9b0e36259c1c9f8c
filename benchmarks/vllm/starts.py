"""What a start takes: stock vLLM and the shim, alone on one GPU in turn, all caches warm.

All sides first start at once, which fills the compile caches and measures nothing (unless ``--warm`` says that they are
full; with ``--starts 0`` that is all, and may go on beside other work). Then each starts alone as often as
``--starts`` says, in rotating order, while the next one's process already imports. Raw rows go to ``OUT/starts.jsonl``
as they come; rows already there, or in ``--done``, aren't measured again.

Run: ``python -m benchmarks.vllm.starts --model FOLDER --plan FILE --out OUT --date D``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.command import command_line, commit_of, input_file, input_folder, made_folder
from benchmarks.vllm.ladders import SIDES, arguments_of
from benchmarks.vllm.rows import Measurement, rotated, say
from benchmarks.vllm.sides import Side, SideError
from benchmarks.vllm.summary import compared, lines
from kpolicy.errors import ConfigError

START_S = 150.0
"""Most seconds for one start"""
MAX_SEQS, MAX_TOKENS = 1024, 8192
TOGETHER: dict[str, Any] = {"gpu_memory_utilization": 0.3, "num_gpu_blocks_override": 4096}
"""Neither is part of the key of vLLM's compile cache. What each finds free means nothing while others start."""


class Starts(Measurement):
    """The whole measurement.

    Args:
        options: the command line's.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options, "starts.jsonl", "starts_log.txt")
        self._cut: list[str] = []
        """The model, once the budget ended before all its starts"""

    def _side(self, name: str, more: dict[str, Any]) -> Side:
        options = self._options
        own = arguments_of(
            name, json.loads(options.kpolicy), max_seqs=MAX_SEQS, max_tokens=MAX_TOKENS, plan=options.plan,
            model=options.model,
        )  # fmt: skip
        llm = json.dumps(json.loads(options.llm) | own | more)
        arguments = ["--llm", llm, "--max-seqs", str(MAX_SEQS), "--max-tokens", str(MAX_TOKENS), *options.child]
        return Side(name, options.model, arguments, self._log, module=options.module)

    def warm(self) -> None:
        """Start all sides at once; one that fails is only told."""
        sides = {name: self._side(name, TOGETHER) for name in self._options.sides}
        for side in sides.values():
            side.go()
        for name, side in sides.items():
            self._started(side, f"{name}, to warm")
        for side in sides.values():
            side.end()

    def _started(self, side: Side, what: str) -> dict[str, Any]:
        """What a start took; nothing if it failed, which is told."""
        given_s = max(10.0, min(START_S, self.left_s()))
        try:
            row = side.answer(given_s)
            self.rows.check(row)
        except (SideError, ConfigError) as error:
            say(f"{what}: FAILED: {error}")
            if given_s < START_S and isinstance(error, SideError):
                self._cut.append(self._options.model.name)
            return {}
        say(
            f"{what}: start {row['start_s']} s, compile {row['compile_s']}, profile {row.get('profile_run_s')} + "
            f"{row.get('profile_graphs_s')}, capture {row.get('capture_s')} s, {row.get('graph_mib')} MiB, "
            f"{row['graphs']}, KV {row['kv_tokens']}"
        )
        return row

    def run(self) -> None:
        """Every start that isn't on record."""
        options, model = self._options, self._options.model.name
        wanted = [
            (repeat, name)
            for repeat in range(options.starts)
            if not self.rows.has(model, "start", options.sides, repeat)
            for name in rotated(options.sides, repeat)
        ]
        if not options.warm and (wanted or not options.starts):
            self.warm()
        following: Side | None = None
        for place, (repeat, name) in enumerate(wanted):
            if self.left_s() < 15:
                say("the budget is spent")
                self._cut.append(model)
                break
            side = following or self._side(name, {})
            following = self._side(wanted[place + 1][1], {}) if place + 1 < len(wanted) else None
            side.go()
            row = self._started(side, f"{model} {name} #{repeat}")
            side.end()
            if row:
                self.rows.keep(model=model, load="start", side=name, repeat=repeat, **self.about, **row)
                self.write()
        if following is not None:
            following.end()

    def write(self) -> None:
        """The summary, as it stands."""
        options, rows = self._options, self.rows.all
        first = rows[0] if rows else {}
        self.rows.summary(
            options.out / "vllm_starts.json",
            {
                "call": self.about["call"], "command": options.command,
                "commit": commit_of(), "cut_by_the_budget": [*dict.fromkeys(self._cut)],
                "date": options.date, "device": first.get("gpu"),
                "versions": {name: first.get(name) for name in ("vllm", "torch")},
                "graphs": {row["side"]: {"graphs": row["graphs"], "sizes": row["sizes"]} for row in rows},
                "rows": compared(rows),
            },
        )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Measure what isn't on record, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=input_folder, required=True, help="folder with a config.json")
    parser.add_argument("--out", type=made_folder, required=True)
    parser.add_argument("--plan", type=input_file, help="plan file of the side planned")
    parser.add_argument("--done", type=Path, action="append", default=[], help="raw rows of an earlier call")
    parser.add_argument("--sides", nargs="*", default=None, help=f"of {', '.join(SIDES)}")
    parser.add_argument("--warm", action="store_true", help="the compile caches are full already")
    parser.add_argument("--starts", type=int, default=3, help="measured starts of each side; 0 fills the caches")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds for all")
    parser.add_argument("--llm", default="{}", help="JSON with further arguments of vllm.LLM, for all sides")
    parser.add_argument(
        "--kpolicy", default='{"additional_config": {"kpolicy": {"policy": "auto"}}}',
        help="JSON with arguments of vllm.LLM that turn the shim on",
    )  # fmt: skip
    parser.add_argument("--module", default="benchmarks.vllm.child", help="what runs in the children")
    parser.add_argument("--date", default="unstated")
    options, options.child = parser.parse_known_args(argv)
    options.command = command_line("benchmarks.vllm.starts", argv)
    if options.starts < 0 or (options.warm and not options.starts):
        parser.error(f"--starts {options.starts}{' --warm' * options.warm} does nothing: give --starts from 1 to "
                     "measure, or --starts 0 without --warm to fill the caches.")  # fmt: skip
    if options.sides is None:
        left_out = ("again", "split") if options.plan is not None else ("again", "split", "planned")
        options.sides = [name for name in SIDES if name not in left_out]
    starts = Starts(options)
    starts.run()
    if options.starts:
        starts.write()
    starts.close()
    for line in lines(starts.rows.all):
        say(line)
    return 0 if starts.rows.all or not options.starts else 1


if __name__ == "__main__":
    sys.exit(main())
