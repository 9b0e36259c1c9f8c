"""What padding costs attention: the same decode rows in graphs of more and more rows, a layer's microseconds.

A graph is of a model's attention calls, one after the other over KV of their own, and what they need once a step,
captured over padding and replayed over the rows. Graphs take turns round by round. Ratios are to the smallest graph
that the rows fit in, 1 where padding is free. Whether all graphs give the same bits is looked at first.

Rows are of nearly equal length, or uneven (cells named so): drawn with a fixed seed from a lognormal distribution whose
longest row is 2.3 to 3.0 times the mean with 8 to 84 rows, about as in batches of the conversation trace.

With ``--before`` kernels of an earlier version, from a folder that has its ``kpolicy/serving/gpu``, take turns with
them; `after` is today's time over theirs, in the same graph. ``--beside`` does so with kernels to choose among, any
number of them: `over_now` is their time over today's.

Run: ``python -m benchmarks.gpu.padded --out FILE [--before FOLDER] [--beside NAME=FOLDER ...] [--rows uneven]``
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from benchmarks.command import input_folder, made_file
from benchmarks.gpu.common import Results, header, steady, synchronise
from benchmarks.pairs import interval

PAGE, MAX_MODEL_LEN = 32, 8192
REPLAYS = 4
"""Of a graph, for one sample"""
LARGEST_DIFFERENCE = 0.02
"""Of two versions' results, relative; more is an error, not rounding"""


class Heads(NamedTuple):
    """A model's attention: for MLA one KV head, of `rope` more than values."""

    layers: int
    heads: int
    kv_heads: int
    dim: int
    rope: int = 0


MODELS = {
    "0.5B": Heads(24, 14, 2, 64), "1B": Heads(16, 32, 8, 64), "8B": Heads(32, 32, 8, 128),
    "dsv2lite": Heads(27, 16, 1, 512, 64),
}  # fmt: skip
CELLS = ((8, 1000), (16, 1000), (48, 1000), (60, 1000), (8, 4000), (16, 4000), (160, 1000))
GRAPHS = (8, 16, 32, 80, 160)
"""(rows, KV tokens of each), and rows of graphs"""
UNEVEN = ((32, 1300), (84, 1300), (8, 4000), (16, 4000))
"""(rows, KV tokens in the mean), each in graphs of its own rows too"""
SPREAD = 0.6
"""Of uneven lengths' logarithms. Longest over mean is 1.8, 2.9 and 3.7 in 8, 32 and 128 rows of the conversation trace,
in the mean over batches, and 2.1, 3.0 and 4.0 with this"""


def even_lengths(count: int, kv: int) -> list[int]:
    """About the mean, as requests have them that are alike."""
    import torch

    return [int(each) for each in torch.linspace(0.9 * kv, kv, count).int()]


def uneven_lengths(count: int, kv: int) -> list[int]:
    """As requests of a real trace have them, of this mean but for rounding."""
    drawn = random.Random(2)
    lengths = [drawn.lognormvariate(0.0, SPREAD) for _ in range(count)]
    return [max(1, round(each * kv * count / sum(lengths))) for each in lengths]


def lengths_of(
    even: Sequence[tuple[int, int]], uneven: Sequence[tuple[int, int]], graphs: Sequence[int]
) -> dict[str, tuple[list[int], list[int]]]:
    """(KV tokens of each row, rows of graphs that they fit in) of each cell of a model, by name."""
    return {
        **{f"{n} x {kv}": (even_lengths(n, kv), [size for size in graphs if size >= n]) for n, kv in even},
        **{
            f"{n} x {kv} uneven": (uneven_lengths(n, kv), sorted({n, *(size for size in graphs if size > n)}))
            for n, kv in uneven
        },
    }


def pages_of(lengths: Sequence[int]) -> list[int]:
    """That each row's KV takes."""
    return [-(-each // PAGE) for each in lengths]


def kernels_of(folder: Path | None) -> dict[str, ModuleType]:
    """The modules `paged` and `latent` of kernels, of an earlier version where a folder of it is given."""
    if folder is None:
        return {name: importlib.import_module(f"kpolicy.serving.gpu.{name}") for name in ("paged", "latent")}
    found: dict[str, ModuleType] = {}
    ours = {f"kpolicy.serving.gpu.{name}" for name in ("paged", "latent", "splits", "launch")}
    kept = {name: sys.modules.pop(name) for name in ours & sys.modules.keys()}
    try:
        # An earlier version's modules import each other by the names that they had.
        for name in ("launch", "splits", "paged", "latent"):
            path = folder / "kpolicy" / "serving" / "gpu" / f"{name}.py"
            if path.exists():
                whole = f"kpolicy.serving.gpu.{name}"
                spec = importlib.util.spec_from_file_location(whole, path)
                assert spec is not None and spec.loader is not None  # noqa: PT018 - it exists
                found[name] = sys.modules[whole] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(found[name])
    finally:
        for name in ours:
            sys.modules.pop(name, None)
        sys.modules.update(kept)
    if not {"paged", "latent"} <= found.keys():
        sys.exit(f"{folder} has no kpolicy/serving/gpu/paged.py and latent.py; give a checkout of an earlier commit.")
    return found


def calls_of(kernels: dict[str, ModuleType], heads: Heads, rows: Any, query: Any, caches: Any) -> Callable[[], Any]:
    """All layers' attention over these rows, as a step makes its calls."""
    import torch

    attend = kernels["latent"].latent_attention if heads.rope else kernels["paged"].paged_attention
    given = inspect.signature(attend).parameters
    splits = kernels.get("splits") or importlib.import_module("kpolicy.serving.gpu.splits")

    def run() -> Any:
        # What a step has once for all layers; earlier versions have counters alone, or nothing.
        more: dict[str, Any] = {}
        if "shares" in given:
            more["shares"] = splits.Shares()
        elif "arrivals" in given:
            more["arrivals"] = splits.new_arrivals(query.device)
        for layer in caches:
            if heads.rope:
                parts = query.split((heads.dim, heads.rope), -1)
                out = attend(*parts, *layer, rows, 0.1, decode_len=1, **more)
            else:
                out = attend(query, *layer, rows, heads.dim**-0.5, prefills=False, **more)
        return out

    with torch.no_grad():
        run()
    return run


def plain(heads: Heads, rows: Any, query: Any, caches: Any) -> Callable[[], Any]:
    """The same by torch's operators, for a dry run."""
    from kpolicy.serving import attention

    def run() -> Any:
        for layer in caches:
            out = attention.paged_attention(query, *layer, rows, heads.dim**-0.5, 0, 0.0)
        return out

    return run


class Graph:
    """The calls captured over padding, and their result; without a GPU they just run."""

    def __init__(self, run: Callable[[], Any], rows: Any, kv_lens: Any) -> None:
        import torch

        self.replay: Callable[[], Any] = run
        # What a graph reads of must live as long as it does.
        self._read = run, rows
        rows.kv_lens.zero_()
        if rows.kv_lens.is_cuda:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._out = run()
            self.replay = graph.replay
        rows.kv_lens[: len(kv_lens)] = kv_lens

    def out(self) -> Any:
        """Of one replay."""
        made = self.replay()
        return (self._out if made is None else made).clone()

    def us(self) -> float:
        """Of one replay, without the host's time on a GPU."""
        import torch

        if not torch.cuda.is_available():
            start = time.perf_counter()
            self.replay()
            return (time.perf_counter() - start) * 1e6
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(400_000)
        begin.record()
        for _ in range(REPLAYS):
            self.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / REPLAYS


def made_caches(heads: Heads, tokens: int, device: Any, dtype: Any) -> list[tuple[Any, ...]]:
    """Each layer's KV."""
    import torch

    def cache(*shape: int) -> Any:
        return torch.randn(tokens + 1, *shape, device=device, dtype=dtype)

    if heads.rope:
        return [(cache(heads.dim + heads.rope),) for _ in range(heads.layers)]
    return [tuple(cache(heads.kv_heads, heads.dim) for _ in "kv") for _ in range(heads.layers)]


def measure(
    versions: dict[str, Any], heads: Heads, caches: Any, lengths: Sequence[int], graphs: Sequence[int], rounds: int
) -> dict[str, Any]:
    """One cell: rows of these lengths in every graph."""
    import torch

    from kpolicy.serving.rows import RowTensors

    like, count, needed = caches[0][0], len(lengths), pages_of(lengths)
    whole: dict[str, Any] = {"dtype": torch.int32, "device": like.device}
    generator = torch.Generator().manual_seed(0)
    own = torch.randperm(sum(needed), generator=generator).to(**whole).split(needed)
    kv_lens = torch.tensor(lengths, **whole)
    queries = torch.randn(max(graphs), heads.heads, heads.dim + heads.rope, generator=generator).to(like)
    made: dict[tuple[str, int], Graph] = {}
    for size in graphs:
        table = torch.zeros(size, max(MAX_MODEL_LEN // PAGE, *needed), **whole)
        for row, pages in enumerate(own):
            table[row, : len(pages)] = pages
        for name, kernels in versions.items():
            rows = RowTensors(table, torch.zeros(size, **whole), torch.arange(size + 1, **whole), PAGE)
            rows.kv_lens[:count] = kv_lens
            query = queries[:size].clone()
            run = (
                plain(heads, rows, query, caches) if kernels is None else calls_of(kernels, heads, rows, query, caches)
            )  # fmt: skip
            made[name, size] = Graph(run, rows, kv_lens)
    outs = {at: graph.out()[:count] for at, graph in made.items()}
    sizes = sorted({size for _, size in made})
    times: dict[tuple[str, int], list[float]] = {at: [] for at in made}
    for i in range(rounds + 2):
        for at in sorted(made, reverse=bool(i % 2)):
            us = made[at].us() / heads.layers
            if i > 1:
                times[at].append(us)

    def ratio(over: tuple[str, int], under: tuple[str, int]) -> list[float]:
        return [round(x, 3) for x in interval([a / b for a, b in zip(times[over], times[under], strict=True)])]

    found: dict[str, Any] = {
        name: {
            "layer_us": {size: steady(times[name, size]) for size in sizes},
            "padding": {size: ratio((name, size), (name, sizes[0])) for size in sizes[1:]},
            "same_bits": all(torch.equal(outs[name, size], outs[name, sizes[0]]) for size in sizes),
        }
        for name in versions
    }
    right = outs["now", sizes[0]].float()
    for name in versions:
        if name != "now":
            difference = (outs[name, sizes[0]].float() - right).norm() / right.norm()
            found[name]["relative_difference"] = round(float(difference), 5)
        if name == "before":
            found["after"] = {size: ratio(("now", size), (name, size)) for size in sizes}
        elif name != "now":
            found[name]["over_now"] = {size: ratio((name, size), ("now", size)) for size in sizes}
    return found


def versions_of(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a cell has of each version."""
    return {name: each for name, each in found.items() if isinstance(each, dict) and "layer_us" in each}


def wrong(found: dict[str, Any]) -> bool:
    """Whether a graph of a cell gives other bits than a smaller one, where it should not, or other results than now."""
    return any(
        (name != "before" and not each["same_bits"]) or not each.get("relative_difference", 0.0) <= LARGEST_DIFFERENCE
        for name, each in versions_of(found).items()
    )  # fmt: skip


def table_of(cells: dict[str, Any]) -> list[str]:
    """A line a cell and version: microseconds and ratio by graph."""
    lines = []
    for cell, found in cells.items():
        ratios = [("after", found.get("after", {}))]
        for name, each in versions_of(found).items():
            padding = {size: f" ({ratio[0]:.2f})" for size, ratio in each["padding"].items()}
            us = [f"{size}: {us:.1f}{padding.get(size, '')}" for size, us in each["layer_us"].items()]
            lines.append(f"{cell:26} {name:6} {'   '.join(us)}")
            ratios.append((f"{name} over now", each.get("over_now", {})))
        for label, by_size in ratios:
            after = [f"{size}: {ratio[0]:.2f}" for size, ratio in by_size.items()]
            lines += [f"{'':26} {label:6} {'   '.join(after)}"] if after else []
    return lines


def named_folder(text: str) -> tuple[str, Path]:
    """``NAME=FOLDER`` in two."""
    name, _, folder = text.partition("=")
    if not name or not folder or name in ("now", "before", "after"):
        message = f"{text!r}: give NAME=FOLDER, a name other than now, before and after"
        raise argparse.ArgumentTypeError(message)
    return name, Path(folder)


def main(argv: list[str] | None = None) -> int:
    """Measure the cells that the file doesn't have; 1 where a graph gives other bits, or other results than before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--before", type=input_folder, help="a folder with an earlier version's kpolicy/serving/gpu")
    parser.add_argument(
        "--beside", nargs="*", type=named_folder, default=[], metavar="NAME=FOLDER",
        help="folders with other kpolicy/serving/gpu, each under a name of its own",
    )  # fmt: skip
    parser.add_argument("--models", nargs="*", choices=MODELS, default=["1B", "0.5B"])
    parser.add_argument(
        "--rows", nargs="*", choices=("even", "uneven"), default=["even", "uneven"], help="cells of these rows alone"
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tiny", action="store_true", help="two layers, few rows, plain kernels: a dry run")
    parser.add_argument("--date", default="unstated")
    parser.add_argument("--seconds", type=float, default=60.0, help="begin nothing new after so many")
    parser.add_argument("--out", type=made_file, required=True)
    options = parser.parse_args(argv)
    options.model, options.layers = "attention over padding", 0

    import torch

    device = torch.device(options.device)
    folders = {"now": None, **({"before": options.before} if options.before else {}), **dict(options.beside)}
    if len(dict(options.beside)) < len(options.beside):
        parser.error("--beside: two folders have one name")
    versions = {name: None if options.tiny else kernels_of(folder) for name, folder in folders.items()}
    models = {"toy": Heads(2, 4, 2, 16)} if options.tiny else {name: MODELS[name] for name in options.models}
    even, uneven, graphs = (((2, 40),), ((3, 40),), (2, 4)) if options.tiny else (CELLS, UNEVEN, GRAPHS)
    cells = lengths_of(
        even if "even" in options.rows else (), uneven if "uneven" in options.rows else (), graphs
    )  # fmt: skip
    results = Results(options.out, header(options, "padded", argv))
    with torch.no_grad():
        for model, heads in models.items():
            missing = {f"{model}/{cell}": each for cell, each in cells.items()}
            missing = {cell: each for cell, each in missing.items() if cell not in results.cells}
            if not missing or results.elapsed() > options.seconds:
                continue
            tokens = max(sum(pages_of(lengths)) for lengths, _ in cells.values()) * PAGE
            caches = made_caches(heads, tokens, device, torch.float32 if options.tiny else torch.bfloat16)
            for cell, (lengths, sizes) in missing.items():
                if results.elapsed() < options.seconds:
                    results.put(cell, measure(versions, heads, caches, lengths, sizes, options.rounds))
                    print(*table_of({cell: results.cells[cell]}), f"{results.elapsed():.0f} s", sep="\n", flush=True)
            del caches
            synchronise(device.type)
    bad = [cell for cell, found in results.cells.items() if wrong(found)]
    print(f"{len(results.cells)} cells, {bad or 'none'} wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
