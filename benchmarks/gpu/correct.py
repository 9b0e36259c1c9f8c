"""A model at its true size: random steps in every mode against EAGER, and every mode against a float32 reference.

``bits``: 10,000 random steps. A step's rows are random: decode rows, also with drafts of 1 to 3 tokens, and prompt
chunks; every other step runs as a policy decides it, the others in the legal way that was taken least. Logits, sampled
tokens and written KV must equal, to the bit, those of the same launches run eagerly, alone, at the graphs' padded
shapes. KV of no other slot may change, and the reserved slot holds NaN whenever attention reads, so a padded row that
leaks shows.

``reference``: sequences that transformers' `generate` continued in float32. They run teacher-forced, all rows' logits
wanted: eagerly, whole prompts alone, and in random modes, batches and chunks. A row's error is its relative L2 distance
from the float32 logits; at p99.9 that of the modes may be twice EAGER's. EAGER runs by the modes' kernels, which a
fault of theirs would cost both, so it is held to transformers itself: the same texts through its own forward and
attention in the model's own type, whose errors EAGER may have twice, at p99.9 and in the median. A token that differs,
of EAGER or of the modes, counts where the reference's top-two margin is above twice transformers' largest logit error.

A mixture of experts in half precision sends some tokens to other experts than float32 does, and those rows are far off
whoever runs them: at p99.9 transformers' rows are as far off as EAGER's, so what is compared is like with like. Where
that is so far that nothing could be twice it, as two logits without anything in common are 1.4 apart, the median tells.

What differs is found on the device and read some steps later, so that the device always has work: processes that share
one take turns at every wait, and a turn is longer than a step.

Steps come in blocks, a seed each. A run goes on where its file ends; ``--first`` and ``--count`` share blocks out to
processes, whose files ``--merge`` adds up. Each block and the reference note the commit they ran at (``--commit``).

Run: ``python -m benchmarks.gpu.correct --config FILE --out FILE [--part bits] [--first N --count N]``
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import sys
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.command import input_file, made_file
from benchmarks.gpu.common import (
    Check,
    Checks,
    Results,
    add_options,
    add_slice_options,
    bits_of,
    config_of,
    header,
    launched,
    load_model,
    logits_checks,
    logits_in,
    logits_of,
    on_device,
    one_kv,
    opened,
    random_shape,
    slices_of,
    steps_by_commit,
    with_tokens,
)
from kpolicy.heap import frozen_heap

BLOCK = 100
AHEAD = 2
"""Steps that are launched before one is read. With more, staging would wait first, which keeps a core busy: it has room
for five launches ahead, and a step may stage twice into the same buffers."""
LIMIT = 2.0
FLOOR = 2.0**-17
"""The least relative error that transformers is taken to have, 64 times float32's rounding of 1: in a float32 model,
as in dry runs, its forward is the reference itself and without error. In bfloat16 errors are over 1000 times it."""
HUGE = 1e15
"""The error of a logit that isn't finite: a number that sorts, with room in float32 for a row's sum of its squares"""
POLICIES = {
    "auto": "throughput", "auto, for latency": "latency", "full": "throughput", "piecewise": "throughput",
    "full_and_piecewise": "throughput", "split": "throughput", "split:form=beside": "throughput",
    "split:form=decodes_beside": "throughput", "vllm": "throughput", "sglang": "throughput",
    "tensorrt_llm": "throughput", "eager": "throughput",
}  # fmt: skip


class Sizes(NamedTuple):
    """How large steps are."""

    num_reqs: int
    num_tokens: int
    kv: int
    decode: tuple[int, ...]
    drafting: tuple[int, ...]
    mixed: tuple[int, ...]


TRUE = Sizes(64, 512, 700, (4, 16, 32, 64), (3, 24, 96, 192), (16, 64, 192, 512))
TOY = Sizes(6, 24, 40, (3, 6), (3, 9, 18), (8, 24))


STRAYS = "KV of no row"


class Compared(NamedTuple):
    """A step and its launches run eagerly, both under way."""

    checks: Checks
    shapes: str
    """How outputs' shapes differ; empty where they don't"""

    def differs(self, *, strayed: bool) -> tuple[str, bool]:
        """(what differs, empty where nothing does; whether it is KV of no row of the step).

        Args:
            strayed: a step before it was found to have changed such KV, which this one then met too.
        """
        name, amount = self.checks.first(but=(STRAYS,) if strayed else ())
        if name == STRAYS:
            slot = f"slot {amount - 1:.0f}"
            return f"KV of {slot}, which no row has: by this step, or by the one before run eagerly", True
        return self.shapes or (f"logits by {amount:.3g}" if name == "logits" else name), False


class Bench:
    """A model with graphs of each kind, and what decides.

    Args:
        model: its KV is filled at random, so that what a row attends to shows.
        sizes: of steps.
    """

    def __init__(self, model: Any, sizes: Sizes) -> None:
        from kpolicy.ladders import CaptureSizes, plan_keys
        from kpolicy.policies.base import admits
        from kpolicy.settings import Settings

        self.model, self.sizes = model, sizes
        self.kv = one_kv(model)
        model.poison_padding()
        # Looking at every address before every replay takes longer than the step where there are thousands of weights.
        self.executor, self.registry = opened(model, check=model.device.type == "cpu")
        settings = {
            name: Settings(max_num_reqs=sizes.num_reqs, max_num_tokens=sizes.num_tokens, num_speculative_tokens=drafts)
            for name, drafts in (("plain", 0), ("drafting", 2))
        }
        ladders = {
            "plain": CaptureSizes(sizes.decode, sizes.mixed, sizes.mixed),
            "drafting": CaptureSizes(sizes.drafting, sizes.mixed, sizes.mixed),
        }
        claims = model.support.claims
        keys = [key for name in settings for key in plan_keys(ladders[name], claims, settings[name])]
        keys = list(dict.fromkeys(key for key in keys if admits(claims, key)))
        self.registry.plan(keys)
        self.executor.capture(keys)
        self.keys = self.registry.captured()
        self.failed = {str(key): why[:300] for key, why in self.executor.capture_errors.items()}
        self.selects = {
            (name, spec): self._select(spec, settings[name], ladders[name]) for name in settings for spec in POLICIES
        }
        self.settings = settings
        for cache in self.kv:
            cache.normal_()
        self._bits = [bits_of(cache.flatten(2)) for cache in self.kv]
        self._before = [bits.clone() for bits in self._bits]
        self._places = on_device(range(1, model.num_slots + 1), model.device)

    def note_kv(self) -> None:
        """Take the KV as it is for what the next step finds; otherwise a step notes what it wrote itself."""
        for bits, kept in zip(self._bits, self._before, strict=True):
            kept.copy_(bits)

    def poison(self) -> None:
        """Fill the reserved slot with NaN, as `model.poison_pad_slot`."""
        for cache in self.kv:
            cache[:, self.model.pad_slot].fill_(float("nan"))

    def strays(self) -> Any:
        """[slots] which slots' KV isn't as it was noted."""
        found = None
        for bits, kept in zip(self._bits, self._before, strict=True):
            changed = (bits != kept).any(2).any(0)
            found = changed if found is None else found.logical_or_(changed)
        return found[: self.model.num_slots]

    def last_stray(self, strays: Any) -> Any:
        """[] the last such slot's number from 1; 0 where there is none."""
        return (strays * self._places).amax()

    def _select(self, spec: str, settings: Any, ladder: Any) -> Any:
        from kpolicy.costs import analytic_costs
        from kpolicy.ladders import CaptureLadder
        from kpolicy.policies import get_policy
        from kpolicy.policies.base import PolicyContext
        from kpolicy.settings import Objective

        policy, claims = get_policy(spec.partition(", ")[0]), self.model.support.claims
        planned = set(policy.plan(ladder, claims, settings))
        context = PolicyContext(
            claims=claims, ladder=CaptureLadder([key for key in self.keys if key in planned]), costs=analytic_costs(),
            settings=settings, objective=Objective.parse(POLICIES[spec]),
        )  # fmt: skip
        return policy.compile(context).select

    def choose(self, kind: str, numbers: Any, counts: Counter[str], asked: Counter[str], rng: random.Random) -> Any:
        """How a step runs: by a policy in every other step, else the legal way that was taken least."""
        from kpolicy.testing.executors import all_decisions
        from tests.executors_launcher.choosing import label

        if rng.random() < 0.5:
            fewest = min(asked[spec] for spec in POLICIES)
            spec = rng.choice([spec for spec in POLICIES if asked[spec] == fewest])
            asked[spec] += 1
            return self.selects[kind, spec](*numbers)
        legal = all_decisions(numbers, self.keys)
        least = min(counts[label(each)] for each in legal)
        return rng.choice([each for each in legal if counts[label(each)] == least])

    def compare(self, decision: Any, inputs: Any) -> Compared:
        """Run a step, and its launches eagerly. Nothing waits for the device, which does all of it in this order."""
        from tests.executors_launcher.checker import eager_part

        own = {*inputs.slot_mapping, *(slot for slots in inputs.slots_ahead for slot in slots)}
        slots = on_device(sorted(own), self.model.device)
        self.poison()
        mine, sampled, outputs = launched(self.executor, decision, inputs)
        strays = self.strays().index_fill_(0, slots, False)
        written = []
        for bits, kept in zip(self._bits, self._before, strict=True):
            written.append(bits.index_select(1, slots))
            bits.index_copy_(1, slots, kept.index_select(1, slots))
        self.poison()
        parts = [eager_part(self.executor, launch, inputs) for launch in decision.launches]
        wanted = [logits_in(part.outputs) for part in parts if len(part.outputs)]
        others = [tokens for part in parts for tokens in _run_of(part)]
        again = [bits.index_select(1, slots) for bits in self._bits]
        for kept, now in zip(self._before, again, strict=True):
            kept.index_copy_(1, slots, now)
        checks, shapes = [Check(STRAYS, strays.any(), self.last_stray(strays))], ""
        if [each.shape for each in mine] != [each.shape for each in wanted] or sum(map(len, mine)) != len(
            inputs.wanted
        ):
            shapes = f"{[list(each.shape) for each in mine]} outputs for {[list(each.shape) for each in wanted]}"
        elif [each.shape for each in sampled] != [each.shape for each in others]:
            shapes = f"{len(sampled)} samplings for {len(others)}"
        else:
            checks += logits_checks(mine, wanted)
            checks += [Check("sampled tokens", (a != b).any()) for a, b in zip(sampled, others, strict=True)]
        checks += [Check("written KV", (now != each).any()) for now, each in zip(again, written, strict=True)]
        return Compared(Checks(checks, outputs.ready), shapes)

    def inputs(self, rng: random.Random, sequences: Any) -> tuple[str, Any]:
        """(which deployment the step is one of, its inputs)."""
        from benchmarks.gpu.regret import inputs_of

        sizes = self.sizes
        if rng.random() < 0.5:
            rows = sequences.random_rows(sizes.num_reqs, min(sizes.num_tokens, 200), 3)
            inputs = sequences.inputs(rows)
            sequences.advance(rows, accepted=rng.choice((None, 1, 2)))
            return "drafting", inputs
        shape = random_shape(
            rng, max_decodes=sizes.num_reqs // 2, max_kv=sizes.kv, max_new=sizes.num_tokens // 2,
            steps=rng.choice((2, 4, 8)), mixed=False,
        )  # fmt: skip
        return "plain", with_tokens(inputs_of(shape, self.model), rng, self.model.vocab)


def _run_of(part: Any) -> list[Any]:
    """What a launch sampled, as device tensors: of each of its decode steps."""
    held = part.outputs
    return list(held.tokens) if len(held) else []


def run_block(bench: Bench, number: int, count: int) -> dict[str, Any]:
    """Steps of one seed."""
    from kpolicy.testing.sequences import Sequences
    from tests.executors_launcher.choosing import label

    rng, begun = random.Random(number), time.monotonic()
    model = bench.model
    sequences = Sequences(number, num_blocks=model.num_blocks, block_size=model.block_size, vocab=model.vocab)
    counts: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    cell: dict[str, Any] = {"steps": 0, "rows": 0, "padded": 0, "differences": []}
    bench.note_kv()
    under_way: deque[tuple[str, Compared]] = deque()
    for step in range(count):
        kind, inputs = bench.inputs(rng, sequences)
        decision = bench.choose(kind, inputs.numbers, counts, asked, rng)
        under_way.append((f"block {number}, step {step}, {decision.label}", bench.compare(decision, inputs)))
        counts[label(decision)] += 1
        cell["steps"] += 1
        cell["rows"] += len(inputs.wanted)
        cell["padded"] += sum(launch.padding(inputs.numbers) for launch in decision.launches)
        cell["differences"] += _read(bench, under_way, AHEAD)
    cell["differences"] += _read(bench, under_way, 0)
    strays = bench.strays()
    if bool(strays.any()):
        slot = int(bench.last_stray(strays)) - 1
        cell["differences"].append(f"block {number}, last step run eagerly: KV of slot {slot}, which no row has")
    return cell | {"ways": dict(counts), "policies": dict(asked), "seconds": round(time.monotonic() - begun, 1)}


def _read(bench: Bench, under_way: deque[tuple[str, Compared]], left: int) -> list[str]:
    """What differs in the steps under way but for the last ones, so many of which are left."""
    found, strayed = [], False
    while len(under_way) > left:
        step, compared = under_way.popleft()
        differs, strays = compared.differs(strayed=strayed)
        if differs:
            found.append(f"{step}: {differs}")
        if strays:
            # The steps launched since met the same KV: all are read, and the next is held to it as it is then.
            strayed, left = True, 0
    if strayed:
        bench.note_kv()
    return found


def totals(cells: dict[str, Any]) -> dict[str, Any]:
    """Blocks added up."""
    blocks = [cell for name, cell in cells.items() if name != "reference"]
    total: dict[str, Any] = {
        name: sum(cell[name] for cell in blocks) for name in ("steps", "rows", "padded", "seconds")
    } | {"differences": [each for cell in blocks for each in cell["differences"]]}  # fmt: skip
    for name in ("ways", "policies"):
        total[name] = dict(sum((Counter(cell[name]) for cell in blocks), Counter()))
    return total | {"steps_by_commit": steps_by_commit(blocks)}


# Against float32


def reference(bench: Bench, *, num: int, prompt: int, new: int, schedules: int) -> dict[str, Any]:
    """Errors of transformers in the model's own type, of EAGER and of the modes against float32; tokens that differ."""
    import torch

    model, rng = bench.model, random.Random(1)
    exact = copy.copy(model)
    exact.hf = in_float32(model.hf)
    texts, logits = [], []
    for _ in range(num):
        ids = [rng.randrange(model.vocab) for _ in range(rng.randint(prompt // 2, prompt))]
        texts.append((len(ids), ids + exact.generate_reference(ids, new)))
        logits.append(exact.reference_logits(texts[-1][1]).float())
    # Before other forwards: a GPU may lack room for both types' weights and more.
    del exact
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    theirs = Errors()
    for (_, ids), wanted in zip(texts, logits, strict=True):
        theirs.add(model.reference_logits(ids).float(), wanted)
    eager = _errors(bench, texts, logits, random.Random(2), modes=False)
    modes = Errors()
    for schedule in range(schedules):
        modes += _errors(bench, texts, logits, random.Random(3 + schedule), modes=True)
    largest_logit = max(float(each.abs().max()) for each in logits)
    return {
        "sequences": num,
        **compared(theirs, eager, modes, largest_logit),
        "reference": "float32 weights of the same model, transformers' own attention",
        "theirs": f"the same forward in {str(model.dtype)[6:]}",
    }


class Errors:
    """How far logits of rows are from the reference's.

    Attributes:
        l2: each row's relative L2 error.
        largest: each row's largest error of a logit.
        wrong: the reference's top-two margin of each row whose likeliest token is another.
    """

    def __init__(self) -> None:
        self.l2: list[float] = []
        self.largest: list[float] = []
        self.wrong: list[float] = []

    def __iadd__(self, other: Errors) -> Errors:
        self.l2 += other.l2
        self.largest += other.largest
        self.wrong += other.wrong
        return self

    def add(self, got: Any, exact: Any) -> None:
        """Rows of logits, [num_rows, vocab] float32 both; what isn't finite is as far off as a number can be."""
        off = (got - exact).nan_to_num(nan=HUGE, posinf=HUGE, neginf=HUGE)
        self.l2 += (off.norm(dim=-1) / exact.norm(dim=-1)).tolist()
        self.largest += off.abs().amax(-1).tolist()
        best = exact.topk(2, dim=-1)
        wrong = (got.argmax(-1) != best.indices[:, 0]).nonzero().flatten()
        self.wrong += (best.values[:, 0] - best.values[:, 1])[wrong].tolist()

    @property
    def p999(self) -> float:
        ordered = sorted(self.l2)
        return ordered[min(len(ordered) - 1, int(0.999 * len(ordered)))]

    @property
    def median(self) -> float:
        return statistics.median(self.l2)


def compared(theirs: Errors, eager: Errors, modes: Errors, largest_logit: float) -> dict[str, Any]:
    """What the three errors say of each other.

    Args:
        theirs: of transformers in the model's own type, taken to be `FLOOR` at least.
        eager: of our eager steps.
        modes: of steps in every mode.
        largest_logit: of the reference, by which the floor of a logit's error goes.
    """
    margin = 2 * max(max(theirs.largest), FLOOR * largest_logit)
    beyond = {"eager": sum(each > margin for each in eager.wrong), "modes": sum(each > margin for each in modes.wrong)}
    return {
        "rows_eager": len(eager.l2), "rows_modes": len(modes.l2), "limit": LIMIT,
        "theirs_p999": theirs.p999, "eager_p999": eager.p999, "modes_p999": modes.p999,
        "theirs_median": theirs.median, "eager_median": eager.median, "modes_median": modes.median,
        "eager_over_theirs": round(eager.p999 / max(theirs.p999, FLOOR), 4),
        "eager_median_over_theirs": round(eager.median / max(theirs.median, FLOOR), 4),
        "ratio": round(modes.p999 / eager.p999, 4),
        "theirs_largest_logit_error": max(theirs.largest), "eager_largest_logit_error": max(eager.largest),
        "tokens_that_differ": {"theirs": len(theirs.wrong), "eager": len(eager.wrong), "modes": len(modes.wrong)},
        "margin": margin, "beyond_margin": sum(beyond.values()), "beyond_margin_of": beyond,
    }  # fmt: skip


def over_limits(found: dict[str, Any]) -> list[str]:
    """Which figures of a reference are over their limits; those of older results lack some."""
    ratios = ("ratio", "eager_over_theirs", "eager_median_over_theirs")
    over = [name for name in ratios if name in found and not found[name] <= LIMIT]
    return over + ["beyond_margin"] * bool(found["beyond_margin"])


def in_float32(module: Any) -> Any:
    """A copy with float32 weights, without one in their own type on the way, which a GPU may lack room for."""
    import torch

    wider: dict[int, Any] = {id(each): each.float() if each.is_floating_point() else each for each in module.buffers()}
    for each in module.parameters():
        wider[id(each)] = torch.nn.Parameter(each.detach().float(), requires_grad=False)
    return copy.deepcopy(module, wider)


def _errors(
    bench: Bench, texts: list[tuple[int, list[int]]], wanted: list[Any], rng: random.Random, *, modes: bool
) -> Errors:  # fmt: skip
    """Of all rows, teacher-forced over all texts.

    Args:
        bench: runs the steps.
        texts: (prompt tokens, all tokens) each.
        wanted: [num_tokens, vocab] logits of each text.
        rng: draws batches and ways.
        modes: in random batches and modes; otherwise eagerly, each prompt whole and alone.
    """
    import torch

    from kpolicy.testing.sequences import Sequences
    from tests.executors_launcher.checker import EAGER

    model, limit = bench.model, bench.sizes
    sequences = Sequences(0, num_blocks=model.num_blocks, block_size=model.block_size, vocab=model.vocab)
    live = [sequences.start() for _ in texts]
    for sequence, (_, tokens) in zip(live, texts, strict=True):
        sequence.tokens = list(tokens)
    found = Errors()
    asked: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    while True:
        left = [i for i, sequence in enumerate(live) if sequence.num_computed < len(texts[i][1])]
        if not left:
            return found
        rows, numbers = _rows(sequences, live, texts, left, rng, limit, modes=modes)
        inputs = sequences.inputs(rows)
        decision = bench.choose("plain", inputs.numbers, counts, asked, rng) if modes else EAGER
        outputs = bench.executor.run(decision, inputs)
        got = torch.cat(logits_of(outputs)).float()
        places = [
            (i, live[i].num_computed + offset) for i, row in zip(numbers, rows, strict=True) for offset in row.wanted
        ]
        found.add(got, torch.stack([wanted[i][position] for i, position in places]))
        sequences.advance(rows)


def _rows(
    sequences: Any, live: list[Any], texts: Any, left: list[int], rng: random.Random, limit: Sizes, *, modes: bool
) -> tuple[list[Any], list[int]]:  # fmt: skip
    """The next step's rows, and whose they are."""
    decoding = [i for i in left if live[i].num_computed >= texts[i][0]]
    prompts = [i for i in left if live[i].num_computed < texts[i][0]]
    if not modes:
        if prompts:
            return [sequences.chunk(live[prompts[0]], texts[prompts[0]][0], range(texts[prompts[0]][0]))], prompts[:1]
        return [sequences.decode(live[i]) for i in decoding], decoding
    chosen = rng.sample(decoding, rng.randint(0 if prompts else 1, len(decoding))) if decoding else []
    chosen = chosen[: limit.num_reqs - 2]
    rows, numbers, budget = [sequences.decode(live[i]) for i in chosen], list(chosen), limit.num_tokens - len(chosen)
    for i in rng.sample(prompts, min(len(prompts), rng.randint(0 if rows else 1, 2))):
        size = min(budget, rng.randint(1, texts[i][0] - live[i].num_computed))
        if size > 0:
            rows.append(sequences.chunk(live[i], size, range(size)))
            numbers.append(i)
            budget -= size
    return rows, numbers


def merge(files: list[Path], out: Path) -> int:
    """One result of several slices."""
    head, cells = slices_of(files)
    result = {**head, "total": totals(cells), "reference": cells.get("reference")}
    out.write_text(json.dumps(result, indent=1) + "\n")
    return _told(result["total"], cells.get("reference"))


def _told(total: dict[str, Any], found: dict[str, Any] | None) -> int:
    over = [] if found is None else over_limits(found)
    print(json.dumps({**total, "reference": found, "over_limits": over}), flush=True)
    return 1 if total["differences"] or over else 0


def main(argv: list[str] | None = None) -> int:
    """Run a slice, or merge slices; 1 where something differed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    argv = sys.argv[1:] if argv is None else argv
    if "--merge" in argv:
        parser.add_argument("--merge", type=input_file, nargs="+", required=True)
        parser.add_argument("--out", type=made_file, required=True)
        options = parser.parse_args(argv)
        return merge(options.merge, options.out)
    add_options(parser, seconds=420.0)
    parser.add_argument("--part", choices=("both", "bits", "reference"), default="both")
    add_slice_options(parser, block=BLOCK, count=10_000)
    options = parser.parse_args(argv)

    import torch

    config, sizes = config_of(options), TOY if options.tiny else TRUE
    results = Results(options.out, header(options, "correct", argv))
    model = load_model(
        config, options, kv_tokens=1024 if options.tiny else 1 << 15, block_size=16 if options.tiny else 64,
        max_model_len=96 if options.tiny else 1024, max_num_reqs=sizes.num_reqs,
    )  # fmt: skip
    with torch.no_grad():
        bench = Bench(model, sizes)
        results.data["failed"] = bench.failed
        print(f"{model!r}: {len(bench.keys)} graphs, {results.elapsed():.0f} s, {bench.failed}", flush=True)
        # A file of before EAGER was held to transformers has a reference without that.
        if options.part != "bits" and "eager_over_theirs" not in results.cells.get("reference", ()):
            size = {"num": 4, "prompt": 24, "new": 12} if options.tiny else {"num": 12, "prompt": 256, "new": 32}
            results.put("reference", {**reference(bench, **size, schedules=3), "commit": options.commit})
            print(results.cells["reference"], flush=True)
        if options.part != "reference":
            with frozen_heap():
                _blocks(bench, results, options)
    results.data["total"] = totals(results.cells)
    results.write()
    bench.executor.release()
    return _told(results.data["total"], results.cells.get("reference"))


def _blocks(bench: Bench, results: Results, options: argparse.Namespace) -> None:
    said = 0.0
    for first in range(options.first, options.first + options.count, BLOCK):
        if str(first) in results.cells:
            continue
        if results.elapsed() > options.seconds:
            return
        cell = run_block(bench, first, min(BLOCK, options.first + options.count - first))
        results.put(str(first), cell | {"commit": options.commit})
        if results.elapsed() - said > 10 or cell["differences"]:
            said = results.elapsed()
            total = totals(results.cells)
            print(f"{total['steps']} steps, {total['differences'][:2]}, {said:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
