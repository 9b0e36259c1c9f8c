"""Whether the shim changes what vLLM computes, on a GPU, with checkpoints of scaled random weights.

For a Qwen2 (vLLM 0.23.0 runs it with its first model runner) and a Llama (with the second), each generated here:

- ``vllm``, the replica of vLLM's rule, through the shim, against stock vLLM: the same mode and size for every step, the
  same `--cudagraph-metrics` rows where vLLM makes them (first runner), the same greedy tokens.
- ``again``, the same stock engine once more, and ``control``, a stock engine with another configuration hash, which
  compiles artefacts of its own as the replica does, against ``stock``. Where the control differs from stock, tokens
  of the replica can't tell anything, and aren't judged. `PINNED` keeps Inductor from choosing kernels by their times.
- ``auto`` against ``cudagraph_mode=NONE`` at the same compile level, by rule 1 of DESIGN.md: greedy tokens, teacher
  forced. Where a token differs, the request goes on from NONE's. A difference counts where the float32 reference's
  top-two margin is above twice NONE's largest logit error; and logit errors are at most twice NONE's at p99.9.
- So too with SPLIT, under an objective that has it, with two forwards in a step (second runner), with steps bounded by
  what the gap is worth, and with lazy capture, once graphs were captured between steps.
- The same check with attention's scale broken must fail.

An engine that can't start or ends is told, and the others are judged; the model doesn't pass then.

Where the runner gives no raw logits (the second), log-probabilities stand for them on both sides: differences between
tokens are the same. All engines of both models start side by side.

Run: ``python -m benchmarks.vllm.correct --out OUT --date D [--work FOLDER]``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.command import made_folder
from benchmarks.vllm.rows import say
from benchmarks.vllm.sides import Side, SideError

VOCAB = 1024
"""So few that every logit of a row can be given, and looked at"""
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2": {
        "model_type": "qwen2", "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8,
        "num_key_value_heads": 2, "num_hidden_layers": 6, "vocab_size": VOCAB, "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "llama": {
        "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8,
        "num_key_value_heads": 2, "num_hidden_layers": 6, "vocab_size": VOCAB, "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
LENGTHS = (5, 40, 300, 700, 17, 128, 1500, 64, 3, 250, 90, 33)
REQUESTS, OUTPUTS, EVERY = 40, (24, 48, 12), 2
CHILD = ["--max-len", "2048", "--max-seqs", "64", "--max-tokens", "1024", "--util", "0.08", "--load-format", "auto"]
STARTED = ("mode", "level", "runner", "scheduler", "graphs", "capture_s", "kv_tokens")
KV_BYTES = 2 << 30
"""Fixed, so that engines may start side by side"""
PINNED: dict[str, Any] = {"inductor_compile_config": {"combo_kernels": False, "benchmark_combo_kernel": False}}
DETERMINISTIC = {"TORCHINDUCTOR_DETERMINISTIC": "1"}
"""So that two engines compile alike: vLLM's default has fused kernels chosen by their times. On all sides."""
LAZY_RUNS = 3
"""Before the run that is judged: steps enough for sizes to become hot and be captured"""
MOST_TURNS = 12
NEEDED = ("stock", "none")
"""Engines without which there is nothing to compare with"""
TWICE = 128
"""The one size of pieces where steps may have two forwards; one of `LENGTHS`"""
SHARE = 0.999


RUNNERS = {"qwen2": "v1", "llama": "v2"}
"""The runner that vLLM 0.23.0 has for each"""
LOGPROBS = {"v1": "raw_logits", "v2": "raw_logprobs"}
"""What is compared: the second runner has no raw logits, and a vLLM that is asked for them takes the first"""
MODULES = {"vllm.v1.worker.gpu_model_runner": "v1", "vllm.v1.worker.gpu.model_runner": "v2"}


def make_checkpoint(name: str, folder: Path) -> Path:
    """A checkpoint in bfloat16 with weights under which attention matters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from kpolicy.serving.weights import randomise

    target = folder / name
    if not (target / "config.json").exists():
        shape = dict(SHAPES[name])
        config = AutoConfig.for_model(shape.pop("model_type"), **shape)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device)
        randomise(model, 1)
        model.save_pretrained(target)
    return target


def prompts_of(vocab: int) -> list[list[int]]:
    """The prompts, of many lengths."""
    chance = random.Random(0)
    return [[chance.randrange(10, vocab - 10) for _ in range(LENGTHS[i % len(LENGTHS)])] for i in range(REQUESTS)]


class Reference:
    """Float32 logits of the same checkpoint by transformers.

    Args:
        folder: the checkpoint.
        logprobs: give log-probabilities in their place.
    """

    def __init__(self, folder: Path, *, logprobs: bool) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._logprobs = logprobs
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.backends.cuda.matmul.allow_tf32 = False
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").to(
            self._device
        )

    def logits(self, prompt: list[int], tokens: list[int]) -> Any:
        """Logits ``[len(tokens), vocab]`` from which each token would be sampled."""
        with self._torch.no_grad():
            ids = self._torch.tensor([prompt + tokens[:-1]], device=self._device)
            found = self._model(ids).logits[0, len(prompt) - 1 :].double().cpu()
        return found.log_softmax(-1) if self._logprobs else found


def errors_of(found: list[dict[str, float]], reference: Any) -> list[tuple[float, float]]:
    """For each position (largest difference, relative L2) over the tokens whose logits vLLM gave, which is all."""
    rows = []
    for place, exact in zip(found, reference, strict=True):
        pairs = [(value, float(exact[int(token)])) for token, value in place.items()]
        squares = sum((a - b) ** 2 for a, b in pairs)
        rows.append((max(abs(a - b) for a, b in pairs), (squares / sum(b * b for _, b in pairs)) ** 0.5))
    return rows


def at(values: list[float], share: float = SHARE) -> float:
    """That quantile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def teacher_forced(
    side: Side, prompts: list[list[int]], base: list[list[int]], first: dict[str, Any]
) -> tuple[list[tuple[int, int]], list[list[dict[str, float]]], int]:
    """Positions at which a side's greedy tokens differ from `base`, each met with base's tokens before it.

    Args:
        side: the engine.
        prompts: as given to both.
        base: tokens that are forced.
        first: what the side generated on its own.

    Returns:
        (request, position) of each difference; the logits seen at every position; positions never compared.
    """
    differs: list[tuple[int, int]] = []
    logits: list[list[dict[str, float]]] = [[] for _ in prompts]
    starts, answer = dict.fromkeys(range(len(prompts)), 0), first
    for _ in range(MOST_TURNS):
        going: dict[int, int] = {}
        for place, (i, start) in enumerate(starts.items()):
            tokens, wanted = answer["tokens"][place], base[i][start:]
            same = next((n for n, (a, b) in enumerate(zip(tokens, wanted, strict=True)) if a != b), len(wanted))
            logits[i] += answer["logits"][place][: same + 1]
            if same < len(wanted):
                differs.append((i, start + same))
                if same + 1 < len(wanted):
                    going[i] = start + same + 1
        starts = going
        if not starts:
            break
        answer = side.ask(
            120.0, prompts=[prompts[i] + base[i][:start] for i, start in starts.items()],
            outputs=[len(base[i]) - start for i, start in starts.items()], every=EVERY, likeliest=VOCAB,
        )  # fmt: skip
    return differs, logits, sum(len(base[i]) - start for i, start in starts.items())


def judge(reference: list[Any], none: list[list[dict[str, float]]], side: Side, answer: dict[str, Any],
          prompts: list[list[int]], base: list[list[int]]) -> dict[str, Any]:  # fmt: skip
    """Rule 1 for one side against NONE's tokens; see the module's docstring."""
    differs, logits, left = teacher_forced(side, prompts, base, answer)
    own = [error for i, rows in enumerate(none) for error in errors_of(rows, reference[i][: len(rows)])]
    theirs = [error for i, rows in enumerate(logits) for error in errors_of(rows, reference[i][: len(rows)])]
    largest = max(error for error, _ in own)
    margins = []
    for i, position in differs:
        top = reference[i][position].topk(2).values
        margins.append(float(top[0] - top[1]))
    counted = sum(margin > 2 * largest for margin in margins)
    ratio = at([error for _, error in theirs]) / at([error for _, error in own])
    return {
        "tokens": sum(map(len, base)), "compared": sum(map(len, base)) - left, "differ": len(differs),
        "counted": counted, "largest_margin": round(max(margins, default=0.0), 5),
        "none_largest_error": round(largest, 5), "error_p999": round(at([error for _, error in theirs]), 6),
        "none_error_p999": round(at([error for _, error in own]), 6), "error_ratio": round(ratio, 4),
        "passes": counted == 0 and ratio <= 2.0 and left == 0,
    }  # fmt: skip


def variants(name: str, options: argparse.Namespace) -> dict[str, tuple[str, dict[str, Any], list[str]]]:
    """Every engine of the check: its side, the arguments of vllm.LLM, and further ones of the child."""
    common: dict[str, Any] = {
        "logprobs_mode": LOGPROBS[RUNNERS[name]], "enable_prefix_caching": False, "cudagraph_metrics": True,
        "kv_cache_memory_bytes": KV_BYTES, "compilation_config": PINNED, "max_logprobs": VOCAB,
        **json.loads(options.llm),
    }  # fmt: skip
    compilation = common["compilation_config"]

    def shim(**settings: Any) -> dict[str, Any]:
        # Engines start side by side, so timing takes longer than it would alone.
        settings = {"calibrate_seconds": 8, **settings, **json.loads(options.kpolicy)}
        return {**common, "additional_config": {"kpolicy": settings}}

    latency = {"objective": "latency", "pace": False, "split": True, "split_decodes": 4, "first_token_ms": 2000.0}
    # As wide a bound on prompts as has most of them divided.
    paced = {"objective": "0:1:4"}
    # Prompts of 128 tokens fit their graph, and don't beside decodes: there two forwards may cost less than one.
    twice = {"split": True, "piecewise_sizes": [TWICE], "mixed_sizes": []}
    second: dict[str, Any] = {"twice": ("kpolicy", shim(policy="auto", **twice), [])} if RUNNERS[name] == "v2" else {}
    return {
        "none": ("stock", {**common, "compilation_config": {**compilation, "cudagraph_mode": "NONE"}}, []),
        "stock": ("stock", common, []),
        "control": ("stock", {**common, "additional_config": {"control": 1}}, []),
        "replica": ("kpolicy", shim(policy=replica_of(name)), []),
        "auto": ("kpolicy", shim(policy="auto"), []),
        "split": ("kpolicy", shim(policy="auto", **latency), []),
        "lazy": ("kpolicy", shim(policy="auto", lazy=True, lazy_graphs=2, lazy_hot=4), []),
        **second,
        "paced": ("kpolicy", shim(policy="auto", **paced), []),
        "broken": ("kpolicy", shim(policy="auto"), ["--break-attention", "0.7"]),
    }


def beside(stock: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What an engine did beside stock with the same requests, and where its tokens first differ."""
    first = next(
        (
            {"request": i, "position": n}
            for i, (a, b) in enumerate(zip(stock["tokens"], other["tokens"], strict=True))
            for n, (x, y) in enumerate(zip(a, b, strict=True))
            if x != y
        ),
        None,
    )
    return {
        "steps": len(stock["steps"]), "steps_equal": stock["steps"] == other["steps"],
        "metrics_rows": len(stock["stats"]), "metrics_equal": stock["stats"] == other["stats"],
        "tokens": sum(map(len, stock["tokens"])), "tokens_equal": stock["tokens"] == other["tokens"],
        "logits_equal": stock["logits"] == other["logits"], "first_difference": first,
    }  # fmt: skip


def replica_passes(replica: dict[str, Any], control: dict[str, Any]) -> bool:
    """Steps and metrics must be stock's; tokens too, where two stock engines agree on theirs."""
    tokens: bool = replica["tokens_equal"] or not control["tokens_equal"]
    return bool(replica["steps_equal"] and replica["metrics_equal"] and tokens)


def replica_of(name: str) -> str:
    """The replica of the rule of the runner that vLLM 0.23.0 gives that model."""
    return f"vllm:version=0.23,runner={RUNNERS[name]}"


def spawned(name: str, options: argparse.Namespace, log: Any, environment: dict[str, str]) -> dict[str, Side]:
    """Every engine's process, which imports until it is told to go."""
    return {
        label: Side(
            side, options.work / name, ["--llm", json.dumps(llm), *CHILD, *more], log, environment, options.module
        )
        for label, (side, llm, more) in variants(name, options).items()
    }


def check(name: str, sides: dict[str, Side], folder: Path, keep: Any) -> dict[str, Any]:
    """All of the module's docstring for one model.

    Args:
        name: of `SHAPES`.
        sides: its engines, starting.
        folder: the checkpoint.
        keep: told what there is after each part.
    """
    prompts = prompts_of(SHAPES[name]["vocab_size"])
    outputs = [OUTPUTS[i % len(OUTPUTS)] for i in range(REQUESTS)]
    result: dict[str, Any] = {"model": name, "started": {}}

    @contextmanager
    def missed(label: str) -> Iterator[None]:
        try:
            yield
        except SideError as error:
            if label in NEEDED:
                raise
            result.setdefault("failed", {})[label] = str(error)
            sides.pop(label).end()
            say(f"{name} {label} FAILED, and the others go on: {error}")

    for label, side_of in list(sides.items()):
        with missed(label):
            started = side_of.answer(200.0)
            result["started"][label] = {key: started.get(key) for key in STARTED}
            say(f"{name} {label}: {result['started'][label]}")

    def generated(label: str) -> dict[str, Any]:
        return sides[label].ask(120.0, prompts=prompts, outputs=outputs, every=EVERY, likeliest=VOCAB)

    stock, none = generated("stock"), generated("none")
    result["again"] = beside(stock, generated("stock"))
    for label in [label for label in ("control", "replica") if label in sides]:
        with missed(label):
            result[label] = beside(stock, generated(label))
    if "replica" in result:
        result["replica"]["policy"] = replica_of(name)
        result["replica"]["passes"] = replica_passes(result["replica"], result.get("control", result["again"]))
    for label in [label for label in ("again", "control", "replica") if label in result]:
        say(f"{name} {label}: {result[label]}")
    keep(result)
    reference = Reference(folder, logprobs=LOGPROBS[RUNNERS[name]] == "raw_logprobs")
    exact = [reference.logits(p, t) for p, t in zip(prompts, none["tokens"], strict=True)]
    for label in [*judged_of(sides), *(label for label in sides if label == "broken")]:
        with missed(label):
            for _ in range(LAZY_RUNS if label == "lazy" else 0):
                generated(label)
            answer = generated(label)
            judged = judge(exact, none["logits"], sides[label], answer, prompts, none["tokens"])
            judged["modes"] = {mode: sum(m == mode for m, _ in answer["steps"]) for mode, _ in answer["steps"]}
            judged["counters"] = sides[label].ask(60.0, statistics=True).get("counters")
            result[label] = judged
            say(f"{name} {label}: {judged}")
        keep(result)
    return result


def judged_of(labels: Iterable[str]) -> list[str]:
    """The engines that rule 1 is for, of those."""
    return [label for label in labels if label in ("auto", "split", "lazy", "twice", "paced")]


def passes(result: dict[str, Any]) -> bool:
    """Whether everything held for a model on the runner it is there for, and the broken engine was noticed."""
    ran = {MODULES.get(str(started["runner"])) for started in result["started"].values()}
    return bool(
        "failed" not in result
        and ran == {RUNNERS[result["model"]]}
        and result["replica"]["passes"]
        and not result["broken"]["passes"]
        and all(result[label]["passes"] for label in {"auto", "split", "lazy", *judged_of(result)})
    )


def main(argv: list[str] | None = None) -> int:
    """Check both models, writing after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=made_folder, required=True)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir(), "kpolicy-checkpoints"))
    parser.add_argument("--only", nargs="*", default=list(SHAPES))
    parser.add_argument("--llm", default="{}")
    parser.add_argument("--kpolicy", default="{}", help="JSON with further settings of the shim")
    parser.add_argument("--module", default="benchmarks.vllm.child")
    parser.add_argument("--date", default="unstated")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / "vllm_correct.json"
    earlier = json.loads(target.read_text())["results"] if target.exists() else []
    results: dict[str, dict[str, Any]] = {result["model"]: result for result in earlier if "passes" in result}

    def keep(result: dict[str, Any]) -> None:
        results[result["model"]] = result
        target.with_suffix(".tmp").write_text(
            json.dumps({"date": options.date, "results": list(results.values())}, indent=1)
        )
        target.with_suffix(".tmp").replace(target)

    with (options.out / "correct_log.txt").open("a") as log:
        for environment in (DETERMINISTIC, {}):
            left = [name for name in options.only if name not in results]
            checked(left, options, log, environment, keep)
    return 0 if all(results.get(name, {}).get("passes") for name in options.only) else 1


def checked(names: list[str], options: argparse.Namespace, log: Any, environment: dict[str, str], keep: Any) -> None:
    """Check these models; one that can't be checked is told, and not kept if no engine of it served."""
    engines = {name: spawned(name, options, log, environment) for name in names}
    try:
        folders = {name: make_checkpoint(name, options.work) for name in names}
        for side in (side for sides in engines.values() for side in sides.values()):
            side.go()
        for name in names:
            with told(name):
                result = check(name, engines[name], folders[name], keep)
                result["pinned"] = {**PINNED, **environment}
                result["passes"] = passes(result)
                keep(result)
            end(engines[name])
    finally:
        for sides in engines.values():
            end(sides)


@contextmanager
def told(name: str) -> Iterator[None]:
    """Say that a model couldn't be checked, and go on."""
    try:
        yield
    except SideError as error:
        say(f"{name} FAILED: {error}")


def end(sides: dict[str, Side]) -> None:
    """End every process."""
    for side in sides.values():
        side.kill()
    for side in sides.values():
        side.end()


if __name__ == "__main__":
    sys.exit(main())
