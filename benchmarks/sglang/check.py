"""Whether graphs change results, by rule 1 of docs/design.md, on a checkpoint made for it.

The checkpoint has random weights scaled by their fan-in, so that attention matters. Logits of SGLang, eagerly, in
graphs and as kpolicy decides, are compared with those of `transformers` in float32, teacher-forced on the tokens that
its `generate` gives:

- at the same padded shape, whether a graph's logits equal eager ones bit by bit (kernels whose number of splits
  depends on being captured differ, and are named by what they serve);
- across shapes, relative L2 of each row: p99.9 at most twice eager's own;
- tokens: a mismatch counts where the reference's margin is above twice eager's largest error;
- attention broken on purpose (rows read each other's KV) must fail the second;
- so too of decode batches larger than SGLang's own graphs (``wide``), and of decodes beside a prompt (``split``), where
  kpolicy replays a graph for each in turn and the eager side runs one mixed batch;
- padding: what a batch leaves empty, in the inputs and behind each layer's attention, has the values that SGLang
  clears it to, after it was written over;
- what served each step is watched: the eager side must have replayed nothing, and the graph side everything.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    from benchmarks.sglang.server import Steps
except ModuleNotFoundError:  # run as a script
    from server import Steps  # type: ignore[import-not-found, no-redef]

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 6, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 4096,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
        "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 1,
    },
    "dsv2": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 1024,
        "intermediate_size": 2048, "moe_intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 16,
        "num_key_value_heads": 16, "vocab_size": 4096, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
        "rope_theta": 1e4, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 4,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
        "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0, "aux_loss_alpha": 0.001,
        "seq_aux": True, "hidden_act": "silu",
        # Yarn with factor 1 changes nothing, and is the one kind of rope that both sides read alike here.
        "rope_scaling": {
            "type": "yarn", "rope_type": "yarn", "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32,
            "beta_slow": 1, "original_max_position_embeddings": 4096,
        }, "tie_word_embeddings": False, "attention_bias": False,
        "bos_token_id": 0, "eos_token_id": 1,
    },
}  # fmt: skip
ROWS, DECODES = 24, 8
LONG = (300, 700, 1500)
"""Further prompts, up to the largest graphs."""
WIDE, WIDE_DECODES, WIDE_PROMPT = 520, 2, 24
"""Rows of decode batches that only kpolicy has graphs of, their steps, and tokens of their prompts."""
SPLIT_PROMPT = 200
"""Tokens of a prompt beside decodes."""
ALIKE = (64, 128, 256, 512, 1024)
"""Prompts at whose size eager and graph are held to each other's bits, as far as there are such graphs."""
ALIKE_DECODES = (16, 512)
PADDED = (9, 21, 37, 65, 100)
"""Prompts of sizes that no graph has."""
_OUTPUTS = ("output", "attn_output_buf")
"""What SGLang's attentions between two segments call what they write to; the second is MLA's absorbed one on 0.5.23."""
_MULTIMODAL = "mrope_positions"
"""The slot that no graph of these checkpoints reads."""


class Check:
    """A generated checkpoint, `transformers` in float32, and SGLang with kpolicy on it."""

    def __init__(self, given: dict[str, Any]) -> None:
        import torch

        self.torch = torch
        family, folder = given.pop("family"), Path(given.pop("folder"))
        folder.mkdir(parents=True, exist_ok=True)
        self.device = given.get("device", "cuda")
        self.reference = self._make(CONFIGS[family], folder)
        defaults = {
            "load_format": "auto", "mem_fraction_static": 0.2, "max_running_requests": 768, "context_length": 2048,
            "chunked_prefill_size": 2048,
        }  # fmt: skip
        self.steps = Steps({**defaults, "model_path": str(folder), **given})

    def start(self) -> dict[str, Any]:
        return self.steps.start()

    def _make(self, config: dict[str, Any], folder: Path) -> Any:
        """Write the checkpoint; the same weights in float32."""
        from safetensors.torch import save_file
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

        torch = self.torch
        (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}), encoding="utf-8")
        values = {name: value for name, value in config.items() if name not in ("model_type", "architectures")}
        torch.manual_seed(0)
        made = CONFIG_MAPPING[config["model_type"]](**values)
        made._attn_implementation = "eager"
        model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() < 2:
                    weight.copy_(torch.ones_like(weight) if "norm" in name else 0.1 * torch.randn_like(weight))
                else:
                    # Experts fused into one tensor have their inputs last, as a linear layer has.
                    scale = 1.0 if "embed" in name else weight.shape[-1] ** -0.5
                    weight.copy_(torch.randn_like(weight) * scale)
                weight.copy_(weight.to(torch.bfloat16).float())
        save_file(
            {name: weight.to(torch.bfloat16).contiguous() for name, weight in _original_names(model.state_dict())},
            str(folder / "model.safetensors"), metadata={"format": "pt"},
        )  # fmt: skip
        return model.to(self.device).eval()

    def _tokens(self, lengths: list[int], decodes: int, seed: int) -> list[list[int]]:
        """Random prompts of these lengths, each with the tokens that the reference goes on with."""
        torch = self.torch
        generator = torch.Generator().manual_seed(seed)
        vocab = self.reference.config.vocab_size
        prompts = [torch.randint(10, vocab, (length,), generator=generator) for length in lengths]
        alike: dict[int, list[int]] = {}
        for i, prompt in enumerate(prompts):
            alike.setdefault(len(prompt), []).append(i)
        found: dict[int, list[int]] = {}
        for places in alike.values():
            for first in range(0, len(places), 64):
                some = places[first : first + 64]
                ids = torch.stack([prompts[i] for i in some]).to(self.device)
                made = self.reference.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=decodes + 1, do_sample=False
                )
                found |= dict(zip(some, made.tolist(), strict=True))
        return [found[i] for i in range(len(lengths))]

    def _wanted(self, rows: list[list[int]], decodes: int) -> Any:
        """The reference's logits ``[(1 + decodes) * rows, vocab]``, in the order of `_got`."""
        torch = self.torch
        found = []
        for tokens in rows:
            ids = torch.tensor([tokens[:-1]], device=self.device)
            found.append(self.reference(ids).logits[0, -(decodes + 1) :].float())
        return torch.stack(found).transpose(0, 1).reshape(-1, found[0].shape[-1])

    def _prefilled(self, rows: list[list[int]], decodes: int, together: int) -> tuple[Any, Any]:
        """(the batch of all rows whose prompts are done, logits of the prompts' last tokens)."""
        steps = self.steps
        steps.clear()
        steps.served = ""
        running: Any = None
        first = []
        for place in range(0, len(rows), together):
            batch = steps.extend_batch(
                [steps.request(tokens[: -decodes - 1]) for tokens in rows[place : place + together]]
            )
            first.append(steps.logits(steps.load(batch))[0].next_token_logits.float().clone())
            steps.grow(batch)
            batch.input_ids = None
            if running is None:
                running = batch
            else:
                running.merge_batch(batch)
        return running, self.torch.cat(first)

    def _nexts(self, rows: list[list[int]], decodes: int, step: int) -> Any:
        """The tokens that a decode step runs."""
        return self.torch.tensor(
            [tokens[len(tokens) - decodes - 1 + step] for tokens in rows], dtype=self.torch.int64, device=self.device
        )

    def _got(
        self, rows: list[list[int]], force: bool | None, *, decodes: int = DECODES, together: int = 1,
        broken: bool = False,
    ) -> Any:  # fmt: skip
        """SGLang's logits: a prefill batch for so many requests each, then decodes of all rows together."""
        torch, steps = self.torch, self.steps
        self._force(force)
        running, first = self._prefilled(rows, decodes, together)
        found = [first]
        for step in range(decodes):
            running.input_ids = self._nexts(rows, decodes, step)
            running.prepare_for_decode()
            if broken:
                running.req_pool_indices = running.req_pool_indices.roll(1)
            found.append(steps.logits(running)[0].next_token_logits.float().clone())
            if broken:
                running.req_pool_indices = running.req_pool_indices.roll(-1)
            steps.grow(running)
        self._force(None)
        return torch.cat(found)

    def _beside(self, rows: list[list[int]], force: bool, *, mixed: bool, broken: bool = False) -> Any:
        """Logits of a prompt and of a decode step of all other rows beside it: ``[rows, vocab]``, the prompt's first.

        Args:
            rows: the prompt, then the decodes, each with two tokens that the reference went on with; of a prompt's
                tokens all but the last are run.
            force: whether graphs are replayed.
            mixed: one batch of both; otherwise the decodes first and then the prompt, as kpolicy's scheduler has it.
            broken: decodes read each other's KV.
        """
        steps = self.steps
        prompt, *others = rows
        self._force(force)
        running, _ = self._prefilled(others, 1, 8)
        steps.served = ""
        nexts = self._nexts(others, 1, 0)
        batch = steps.extend_batch([steps.request(prompt[:-1])])
        if mixed:
            running.prepare_for_decode()
            batch.mix_with_running(running)
            found = steps.logits(steps.load(batch, nexts))[0].next_token_logits.float().clone()
        else:
            running.input_ids = nexts
            running.prepare_for_decode()
            if broken:
                running.req_pool_indices = running.req_pool_indices.roll(1)
            decoded = steps.logits(running)[0].next_token_logits.float().clone()
            prompted = steps.logits(steps.load(batch))[0].next_token_logits.float().clone()
            found = self.torch.cat([prompted, decoded])
        self._force(None)
        return found

    def _force(self, force: bool | None) -> None:
        from kpolicy_sglang.state import state_of

        state = state_of(self.steps.runner)
        for phase in state.phases.values() if state is not None else ():
            phase.force = force

    def _same_shape(self) -> dict[str, Any]:
        """Graphs against eager at captured sizes, where nothing is padded."""
        torch, steps = self.torch, self.steps
        found = {}
        generator = torch.Generator().manual_seed(5)
        vocab = self.reference.config.vocab_size
        for size in (each for each in ALIKE if each in steps.runner.prefill_cuda_graph_runner.capture_num_tokens):
            tokens = torch.randint(10, vocab, (size,), generator=generator).tolist()
            got = []
            for force in (False, True):
                self._force(force)
                steps.clear()
                got.append(steps.logits(steps.load(steps.extend_batch([steps.request(tokens)])))[0])
            a, b = (each.next_token_logits.float() for each in got)
            found[f"extend {size}"] = {"bitwise": bool((a == b).all()), "relative": _relative(a, b)}
        for count in (each for each in ALIKE_DECODES if each in steps.runner.decode_cuda_graph_runner.capture_bs):
            rows = [torch.randint(10, vocab, (40,), generator=generator).tolist() for _ in range(count)]
            rows = [[*row, *([5] * 3)] for row in rows]
            got = [self._got(rows, force, decodes=2, together=min(count, 32)) for force in (False, True)]
            a, b = (each[len(rows) :] for each in got)
            found[f"decode {count}"] = {"bitwise": bool((a == b).all()), "relative": _relative(a, b)}
        self._force(None)
        return found

    def _padding(self) -> dict[str, Any]:
        """What padded steps leave in the rows that they don't have: values that aren't as SGLang clears them.

        ``outputs`` are the attention outputs that were looked at, of ``wanted``, and ``of_graphs`` those that the graph
        itself cleared; ``hooked`` says whether graphs are made to.
        """
        torch, steps = self.torch, self.steps
        self._force(True)
        left = outputs = of_graphs = 0
        prefill, decode = steps.runner.prefill_cuda_graph_runner, steps.runner.decode_cuda_graph_runner
        generator = torch.Generator().manual_seed(7)
        vocab = self.reference.config.vocab_size
        for tokens in PADDED:
            ids = torch.randint(10, vocab, (tokens,), generator=generator).tolist()
            size = min(each for each in prefill.capture_num_tokens if each >= tokens)
            (graph,) = (graph for shape, graph in prefill.backend._graphs.items() if shape.size == size)
            steps.clear()
            batch = steps.load(steps.extend_batch([steps.request(ids)]))
            write_over(prefill.buffer_registry)
            with looked_at(graph, tokens) as found:
                steps.logits(batch)
            left += sum(each for each, _ in found) + unlike(prefill.buffer_registry, (1, 1), (tokens, size))
            outputs += len(found)
            of_graphs += sum(cleared for _, cleared in found)
        for rows in (3, 13):
            size = min(each for each in decode.capture_bs if each >= rows)
            steps.clear()
            state = steps.decodes(rows)
            write_over(decode.buffer_registry)
            steps.decode(state)
            left += unlike(decode.buffer_registry, (rows, size), (rows, size))
        self._force(None)
        return {
            "left": left, "outputs": outputs, "wanted": len(PADDED) * self.reference.config.num_hidden_layers,
            "of_graphs": of_graphs, "hooked": self._hooked(), "prompts": list(PADDED), "decodes": [3, 13],
        }  # fmt: skip

    def _hooked(self) -> bool:
        """Whether prompts' graphs are made to clear attention's output."""
        from kpolicy_sglang.hooks import clears_in_graphs
        from kpolicy_sglang.state import state_of

        state = state_of(self.steps.runner)
        prefill = self.steps.runner.prefill_cuda_graph_runner
        return state is not None and clears_in_graphs(state, prefill.backend, prefill)

    def check(self) -> dict[str, Any]:
        """All of the rule; `passed` says whether what it asks holds."""
        generation = self.reference.generation_config
        generation.eos_token_id = generation.pad_token_id = None
        lengths = [*(16 + (37 * i) % 90 for i in range(ROWS)), *LONG]
        rows = self._tokens(lengths, DECODES, 3)
        parts = {"": self._judged(
            self._wanted(rows, DECODES),
            {
                "eager": lambda: self._got(rows, False), "graph": lambda: self._got(rows, True),
                "kpolicy": lambda: self._got(rows, None), "broken": lambda: self._got(rows, True, broken=True),
            },
        )}  # fmt: skip
        many = self._tokens([WIDE_PROMPT + i % 5 for i in range(WIDE)], WIDE_DECODES, 11)
        how = {"decodes": WIDE_DECODES, "together": 32}
        parts["wide"] = self._judged(
            self._wanted(many, WIDE_DECODES),
            {
                "eager": lambda: self._got(many, False, **how), "graph": lambda: self._got(many, True, **how),
                "kpolicy": lambda: self._got(many, None, **how),
                "broken": lambda: self._got(many, True, broken=True, **how),
            },
        ) | {"decodes": WIDE}  # fmt: skip
        both = self._tokens([SPLIT_PROMPT, *lengths[:ROWS]], 1, 13)
        # Of the prompt the last token but one is what its last logits are of, as of decodes.
        parts["split"] = self._judged(
            self._wanted(both, 1)[len(both) :],
            {
                "eager": lambda: self._beside(both, False, mixed=True),
                "graph": lambda: self._beside(both, True, mixed=False),
                "broken": lambda: self._beside(both, True, mixed=False, broken=True),
            },
        ) | {"prompt": SPLIT_PROMPT, "decodes": ROWS}  # fmt: skip
        padding, first = self._padding(), parts.pop("")
        return {
            **first, "passed": all(each["passed"] for each in (first, *parts.values())) and cleared(padding),
            **parts, "padding": padding, "same_shape": self._same_shape(),
        }  # fmt: skip

    def _judged(self, wanted: Any, sides: dict[str, Callable[[], Any]]) -> dict[str, Any]:
        """The rule for one kind of batch, whose logits the sides give in turn; ``broken`` is there to be noticed."""
        got, served = {}, {}
        for name, of_side in sides.items():
            got[name] = of_side()
            served[name] = {each: self.steps.served.count(each) for each in "PD-"}
        errors = {name: _row_errors(each, wanted) for name, each in got.items()}
        p999 = {name: float(each.quantile(0.999)) for name, each in errors.items()}
        del got["broken"], served["broken"]
        limit = 2 * float((got["eager"] - wanted).abs().max())
        top = wanted.topk(2, dim=-1)
        sure = (top.values[:, 0] - top.values[:, 1]) > limit
        missed = {
            name: {
                "all": int((each.argmax(-1) != top.indices[:, 0]).sum()),
                "where the margin is above the limit": int(((each.argmax(-1) != top.indices[:, 0]) & sure).sum()),
            }
            for name, each in got.items()
        }
        return {
            "served": served, "rows_unlike_eager": {
                name: int((each != got["eager"]).any(-1).sum()) for name, each in got.items() if name != "eager"
            },
            "passed": passed(served, p999, missed), "rows": len(wanted),
            "relative_l2_p999": p999, "median": {name: float(each.median()) for name, each in errors.items()},
            "token_mismatches": missed, "rows_with_a_sure_token": int(sure.sum()),
        }  # fmt: skip


def passed(served: dict[str, dict[str, int]], p999: dict[str, float], missed: dict[str, dict[str, int]]) -> bool:
    """Whether the rule holds, and the sides ran what they are named after.

    Args:
        served: steps by what served them (``P``, ``D`` for graphs of the phases, ``-`` for none), by side.
        p999: errors by side, that of broken attention too.
        missed: tokens that differ from the reference, by side.
    """
    # An eager side that replayed, or another that didn't, would compare a run with itself.
    eager, graph = served["eager"], served["graph"]
    apart = eager["-"] > 0 == eager["P"] + eager["D"] and graph["P"] > 0 == graph["-"] and graph["D"] > 0
    apart = apart and all(side["P"] + side["D"] > 0 for name, side in served.items() if name != "eager")
    within = all(p999[name] <= 2 * p999["eager"] for name in served)
    tokens = not any(each["where the margin is above the limit"] for each in missed.values())
    return apart and within and tokens and p999["broken"] > 2 * p999["eager"]


def cleared(padding: dict[str, Any]) -> bool:
    """Whether nothing is left where all was looked at, and graphs cleared what they are made to.

    Args:
        padding: what `Check` found.
    """
    looked = padding["outputs"] == padding["wanted"] > 0
    return looked and not padding["left"] and padding["of_graphs"] == padding["hooked"] * padding["outputs"]


@contextmanager
def looked_at(graph: Any, rows: int) -> Iterator[list[tuple[int, bool]]]:
    """Look behind so many rows of each attention output while a graph is replayed.

    Yields what is found: values that aren't 0, and whether it was the graph that cleared them. What else runs between
    segments has no such output, and isn't looked at.
    """
    found: list[tuple[int, bool]] = []
    own = list(graph._break_fns)

    def looking(attention: Any) -> Any:
        kept = dict(zip(attention.__code__.co_freevars, (each.cell_contents for each in attention.__closure__),
                        strict=True))  # fmt: skip
        given = _by_name(kept["captured_inner"], kept["captured_args"], kept["captured_kwargs"])
        output = next((given[name] for name in _OUTPUTS if name in given), None)
        if output is None:
            return attention
        first = kept["captured_kwargs"].get("cleared_from")

        def run() -> Any:
            made = attention()
            found.append((int((output[rows:] != 0).sum()), first is not None and first <= rows))
            return made

        return run

    graph._break_fns[:] = [looking(each) for each in own]
    try:
        yield found
    finally:
        graph._break_fns[:] = own


def _by_name(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a function is given, by its parameters' names; those of a torch operator are in its schema."""
    operator = getattr(function, "default", None)
    if operator is not None:
        return {**dict(zip((each.name for each in operator._schema.arguments), args, strict=False)), **kwargs}
    return dict(inspect.signature(function).bind(*args, **kwargs).arguments)


def write_over(registry: Any) -> None:
    """Put ones into all of a graph's inputs, as other batches might have."""
    for slot in registry._slots.values():
        if slot.buffer is not None:
            slot.buffer.fill_(1)


def unlike(registry: Any, rows: tuple[int, int], tokens: tuple[int, int]) -> int:
    """Values behind a batch that aren't as SGLang clears them, but for multimodal positions.

    Args:
        registry: the inputs of a graph.
        rows: requests of the batch and of the graph.
        tokens: tokens, likewise.
    """
    found = 0
    for slot in registry._slots.values():
        value = {"ZERO": 0, "FILL_SENTINEL": slot.pad_value}.get(slot.padding_policy.name)
        if slot.buffer is not None and value is not None and slot.axis != "none" and slot.name != _MULTIMODAL:
            raw, padded = rows if slot.axis == "bs" else tokens
            found += int((slot.slice_for(rows[1], tokens[1])[..., raw:padded] != value).sum())
    return found


def _row_errors(got: Any, wanted: Any) -> Any:
    return (got - wanted).norm(dim=-1) / wanted.norm(dim=-1)


def _relative(a: Any, b: Any) -> float:
    return float((a - b).norm() / a.norm())


def _original_names(state: dict[str, Any]) -> list[tuple[str, Any]]:
    """Weights by the names that published checkpoints have: experts one by one."""
    found = []
    for name, weight in state.items():
        if name.endswith("experts.gate_up_proj"):
            for i, expert in enumerate(weight):
                gate, up = expert.chunk(2, dim=0)
                found += [(name.replace("gate_up_proj", f"{i}.gate_proj.weight"), gate),
                          (name.replace("gate_up_proj", f"{i}.up_proj.weight"), up)]  # fmt: skip
        elif name.endswith("experts.down_proj"):
            found += [(name.replace("down_proj", f"{i}.down_proj.weight"), expert) for i, expert in enumerate(weight)]
        else:
            found.append((name, weight))
    return found
