"""Whether the shim changes what vLLM computes, on a GPU, with checkpoints of scaled random weights.

For a Qwen2 (vLLM 0.23.0 runs it with its first model runner) and a Llama (with the second), each generated here:

- ``vllm``, the replica of vLLM's rule, through the shim, against stock vLLM: the same mode and size for every step, the
  same `--cudagraph-metrics` rows where vLLM makes them (first runner), the same greedy tokens.
- ``auto`` against ``cudagraph_mode=NONE`` at the same compile level, by rule 1 of DESIGN.md: greedy tokens, teacher
  forced. Where a token differs, the request goes on from NONE's. A difference counts where the float32 reference's
  top-two margin is above twice NONE's largest logit error; and logit errors are at most twice NONE's at p99.9.
- The same check with attention's scale broken must fail.

Run: ``python -m benchmarks.vllm.correct --out OUT --date D [--work FOLDER]``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from benchmarks.vllm.sides import Side, SideError
from benchmarks.vllm.stock_vs_kpolicy import say

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2": {
        "model_type": "qwen2", "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8,
        "num_key_value_heads": 2, "num_hidden_layers": 6, "vocab_size": 8192, "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "llama": {
        "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8,
        "num_key_value_heads": 2, "num_hidden_layers": 6, "vocab_size": 8192, "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
LENGTHS = (5, 40, 300, 700, 17, 128, 1500, 64, 3, 250, 90, 33)
REQUESTS, OUTPUTS, EVERY = 40, (24, 48, 12), 2
CHILD = ["--max-len", "2048", "--max-seqs", "64", "--max-tokens", "1024", "--util", "0.08", "--load-format", "auto"]
MOST_TURNS = 12
SHARE = 0.999


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
    """Float32 logits of the same checkpoint by transformers."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.backends.cuda.matmul.allow_tf32 = False
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").to(
            self._device
        )

    def logits(self, prompt: list[int], tokens: list[int]) -> Any:
        """Logits ``[len(tokens), vocab]`` from which each token would be sampled."""
        with self._torch.no_grad():
            ids = self._torch.tensor([prompt + tokens[:-1]], device=self._device)
            return self._model(ids).logits[0, len(prompt) - 1 :].double().cpu()


def errors_of(found: list[dict[str, float]], reference: Any) -> list[tuple[float, float]]:
    """For each position (largest difference, relative L2) over the tokens whose logits vLLM gave."""
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
            outputs=[len(base[i]) - start for i, start in starts.items()], every=EVERY,
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


def check(name: str, folder: Path, log: Any, options: argparse.Namespace) -> dict[str, Any]:
    """All of the module's docstring for one model."""
    prompts = prompts_of(SHAPES[name]["vocab_size"])
    outputs = [OUTPUTS[i % len(OUTPUTS)] for i in range(REQUESTS)]
    replica = f"vllm:version=0.23,runner={'v2' if name == 'llama' else 'v1'}"

    def llm(mode: str | None, policy: str | None) -> str:
        arguments: dict[str, Any] = {
            "logprobs_mode": "raw_logits", "enable_prefix_caching": False, "cudagraph_metrics": True,
            "enforce_eager": False, **json.loads(options.llm),
        }  # fmt: skip
        if mode:
            arguments["compilation_config"] = {"cudagraph_mode": mode}
        if policy:
            arguments["additional_config"] = {"kpolicy": {"policy": policy, **json.loads(options.kpolicy)}}
        return json.dumps(arguments)

    def generated(side_name: str, mode: str | None, policy: str | None, *more: str) -> tuple[Side, dict[str, Any]]:
        side = Side(side_name, folder, ["--llm", llm(mode, policy), *CHILD, *more], log, module=options.module)
        try:
            started = side.answer(180.0)
            answer = side.ask(120.0, prompts=prompts, outputs=outputs, every=EVERY)
        except SideError:
            side.end()
            raise
        answer["started"] = {key: started.get(key) for key in ("mode", "level", "runner", "graphs", "start_s")}
        say(f"{name} {side_name} {mode} {policy} {more}: started {answer['started']}, {len(answer['steps'])} steps")
        return side, answer

    sides: list[Side] = []
    try:
        stock_side, stock = generated("stock", None, None)
        stock_side.end()
        side, twin = generated("kpolicy", None, replica)
        side.end()
        none_side, none = generated("stock", "NONE", None)
        none_side.end()
        reference = Reference(folder)
        exact = [reference.logits(p, t) for p, t in zip(prompts, none["tokens"], strict=True)]
        result: dict[str, Any] = {
            "model": name, "started": stock["started"],
            "replica": {
                "policy": replica, "steps": len(stock["steps"]), "steps_equal": stock["steps"] == twin["steps"],
                "metrics_rows": len(stock["stats"]), "metrics_equal": stock["stats"] == twin["stats"],
                "tokens": sum(map(len, stock["tokens"])), "tokens_equal": stock["tokens"] == twin["tokens"],
                "logits_equal": stock["logits"] == twin["logits"],
            },
        }  # fmt: skip
        say(f"{name} replica: {result['replica']}")
        for label, policy, more in (("auto", "auto", ()), ("broken", "auto", ("--break-attention", "0.7"))):
            side, answer = generated("kpolicy", None, policy, *more)
            sides.append(side)
            result[label] = judge(exact, none["logits"], side, answer, prompts, none["tokens"])
            result[label]["modes"] = {mode: sum(m == mode for m, _ in answer["steps"]) for mode, _ in answer["steps"]}
            say(f"{name} {label}: {result[label]}")
            side.end()
        return result
    finally:
        for side in sides:
            side.end()


def main(argv: list[str] | None = None) -> int:
    """Check both models, writing after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/kpolicy-checkpoints"))  # noqa: S108
    parser.add_argument("--only", nargs="*", default=list(SHAPES))
    parser.add_argument("--llm", default="{}")
    parser.add_argument("--kpolicy", default="{}", help="JSON with further settings of the shim")
    parser.add_argument("--module", default="benchmarks.vllm.child")
    parser.add_argument("--date", default="unstated")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    results, failed = [], 0
    with (options.out / "correct_log.txt").open("a") as log:
        for name in options.only:
            try:
                result = check(name, make_checkpoint(name, options.work), log, options)
            except SideError as error:
                failed += 1
                say(f"{name} FAILED: {error}")
                continue
            replica = result["replica"]
            equal = replica["steps_equal"] and replica["metrics_equal"] and replica["tokens_equal"]
            result["passes"] = equal and result["auto"]["passes"] and not result["broken"]["passes"]
            failed += not result["passes"]
            results.append(result)
            target = options.out / "vllm_correct.json"
            target.write_text(json.dumps({"date": options.date, "results": results}, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
