"""0.5.23's own votes and forward-time checks over data-parallel ranks, out of its wheel, against the replica."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

from kpolicy.attention import Claims
from kpolicy.costs import H200, LLAMA_8B, analytic_costs
from kpolicy.ladders import CaptureLadder, CaptureSizes
from kpolicy.modes import Mode
from kpolicy.policies.base import PolicyContext
from kpolicy.policies.sglang import SglangPolicy
from kpolicy.settings import Settings
from kpolicy.shapes import BatchNumbers, BatchShape
from tests.oracle.sglang_real import (
    FOLDER,
    MARKS,
    RUNNER,
    Release,
    _class,
    _execute,
    _named,
    decode_runner,
    prefill_runner,
)
from tests.oracle.test_sglang import random_sizes

DEPLOYMENTS, STEPS = 100, 100

pytestmark = MARKS


class ForwardMode:
    """A mode as far as the votes ask."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_idle(self) -> bool:
        return self.name == "IDLE"

    def is_decode(self) -> bool:
        return self.name == "DECODE"

    def is_decode_or_idle(self) -> bool:
        return self.name in ("DECODE", "IDLE")

    def is_prebuilt(self) -> bool:
        return False

    def is_target_verify(self) -> bool:
        return False


MODES = SimpleNamespace(**{name: ForwardMode(name) for name in ("EXTEND", "MIXED", "DECODE", "IDLE")})


class Real:
    """SGLang's own code: both runners' rules and both votes."""

    def __init__(self) -> None:
        release = Release(FOLDER)
        self.prefill = prefill_runner(release, cuda=True)
        more = {"can_run_graph", "_has_inactive_dp_rank"}
        own = _named(release.tree(f"{RUNNER}/prefill_cuda_graph_runner.py"), more)
        names: dict[str, Any] = {
            "ForwardMode": MODES, "prefill_graph_tolerates_sum_len": lambda: False, "is_cp_active": lambda _: True,
        }  # fmt: skip
        made = _execute([_class("More", own)], names)["More"]
        for name in more:
            setattr(self.prefill, name, getattr(made, name))
        self.decode = decode_runner(release)
        names = {
            "ForwardMode": MODES, "PrefillCudaGraphRunner": self.prefill, "uses_ssm_state": lambda _: False,
            "get_moe_a2a_backend": lambda: SimpleNamespace(is_none=lambda: True), "get_cp_strategy": lambda: None,
            "get_memory": lambda: SimpleNamespace(enable_hisparse=False),
            "get_exec": lambda: SimpleNamespace(overlap=SimpleNamespace(enable_two_batch_overlap=False)),
        }  # fmt: skip
        voting = release.tree("sglang/srt/managers/scheduler_components/dp_attn.py")
        found = _execute(_named(voting, {"_local_decode_cuda_graph_vote", "_local_prefill_cuda_graph_vote"}), names)
        self.decode_vote = found["_local_decode_cuda_graph_vote"]
        self.prefill_vote = found["_local_prefill_cuda_graph_vote"]


class Deployment:
    """A random deployment: the replica, and SGLang's two runners."""

    def __init__(self, real: Real, rng: random.Random, *, loras: float = 0.2) -> None:
        self.real = real
        self.full, lora, captured = rng.random() < 0.3, rng.random() < loras, rng.random() < 0.7
        settings = Settings(max_num_reqs=64, max_num_tokens=4096, max_loras=2 if lora else 0)
        policy = SglangPolicy(
            prefill="full" if self.full else "breakable", eager_mixed=rng.random() < 0.3,
            max_seq_len=rng.choice([0, 0, 2000]), prefill_lora=captured,
        )  # fmt: skip
        prefill, decode = random_sizes(rng, 1024), random_sizes(rng, 64)
        self.largest = prefill[-1]
        claims, sizes = Claims.at_level("mixed"), CaptureSizes(decode, prefill, prefill)
        self.replica = policy.compile(
            PolicyContext(
                claims=claims, ladder=CaptureLadder(policy.plan(sizes, claims, settings)),
                costs=analytic_costs(LLAMA_8B, H200), settings=settings,
            )
        )  # fmt: skip
        self.prefill = real.prefill()
        self.prefill.__dict__.update(
            _qwen_bcg_hc_sidechannel=False, _qwen_bcg_mtp_draft=False, _is_full_backend=self.full, _fa4_prefill=False,
            _capture_req_slots=policy.slots(settings) if self.full else 1, _captured_attn_metadata_max_bs=None,
            prefer_eager_mixed_prefill=policy.eager_mixed, prefill_backend_name=policy.prefill, capture_hidden_mode=0,
            has_mha_companion_layers=False, _attn_backend_is_dsa=False, _capture_chunked_prefix=False,
            max_context_size=None, max_seq_len=policy.max_seq_len or None, max_num_tokens=prefill[-1],
            capture_num_tokens=list(prefill), enable_lora=lora, _capture_lora=lora and captured,
            _backend_vote_prefill_cuda_graph=None, _backend_can_run_prefill_cuda_graph=None,
            model_runner=SimpleNamespace(
                lora_manager=SimpleNamespace(can_use_prefill_cuda_graph=lambda batch: not batch.too_many_adapters)
            ),
        )  # fmt: skip
        self.decode = real.decode()
        self.decode.__dict__.update(
            ragged_verify_mode=False, captured_req_width=1, require_mlp_tp_gather=True, require_mlp_sync=True,
            enable_pdmux=False, disable_padding=False, backend=None, max_bs=decode[-1], is_encoder_decoder=False,
            enable_two_batch_overlap=False,
            model_runner=SimpleNamespace(spec_algorithm=SimpleNamespace(is_ngram=lambda: False)),
            _max_dp_batch_size=lambda batch: max(batch.counts),
        )  # fmt: skip

    def really(self, ranks: list[Rank]) -> list[bool]:
        """Whether each rank replays, by SGLang's own vote and its check at the step."""
        tokens = [rank.tokens for rank in ranks]
        decode = all(self.real.decode_vote(local_batch=rank.scheduled, disable_cuda_graph=False) for rank in ranks)
        prefill = all(
            self.real.prefill_vote(
                local_batch=rank.scheduled, num_tokens=rank.tokens, prefill_graph_runner=self.prefill,
                coordinated_prefill=True, breakable_prefill=not self.full, model_config=None,
                spec_algorithm=SimpleNamespace(is_none=lambda: True),
            )
            for rank in ranks
        )  # fmt: skip
        extends = any(rank.kind in ("EXTEND", "MIXED") for rank in ranks)
        found = []
        for rank in ranks:
            # SGLang runs the decodes of a rank as extends of one token beside another's prompts, where all can.
            converted = rank.kind == "DECODE" and extends and prefill and min(tokens) > 0
            if rank.kind in ("DECODE", "IDLE") and not converted:
                batch = SimpleNamespace(
                    replace_embeds=None, spec_info=None, batch_size=rank.num_reqs, counts=tokens,
                    can_run_decode_cuda_graph=decode, forward_mode=getattr(MODES, rank.kind),
                )  # fmt: skip
                found.append(bool(self.decode.can_run_graph(batch)))
            else:
                found.append(self._extends(rank, tokens, prefill, converted))
        return found

    def _extends(self, rank: Rank, tokens: list[int], voted: bool, converted: bool) -> bool:
        """The check of a rank that runs an extend, on the batch as it is padded."""
        padded = rank.tokens
        if voted and max(tokens) <= self.largest:
            padded = self.prefill._pad_to_bucket(max(tokens), self.prefill.capture_num_tokens)
        counts = [padded] * len(tokens) if voted and min(tokens) > 0 else tokens
        if len(tokens) == 1:
            counts, padded = None, rank.tokens
        batch = SimpleNamespace(
            global_num_tokens_cpu=counts, can_run_dp_prefill_cuda_graph=voted, batch_size=rank.num_reqs,
            input_ids=[0] * padded, input_embeds=rank.scheduled.input_embeds, replace_embeds=None,
            extend_prefix_lens_cpu=None if converted else rank.scheduled.prefix_lens,
            forward_mode=MODES.EXTEND if converted else rank.scheduled.forward_mode, capture_hidden_mode=0,
            return_logprob=rank.scheduled.return_logprob, contains_mm_inputs=lambda: False,
            too_many_adapters=rank.too_many_adapters,
        )  # fmt: skip
        self.prefill._batch_max_context_len = lambda _: rank.longest
        return bool(self.prefill.can_run_graph(batch))

    def alone(self, rank: Rank) -> tuple[bool, bool]:
        """Whether a rank without others replays its prompts, by SGLang's check and by the replica."""
        decision = self.replica.select(*rank.numbers)
        return self._extends(rank, [rank.tokens], voted=False, converted=False), decision.mode is not Mode.EAGER

    def by_replica(self, ranks: list[Rank]) -> list[bool]:
        """The same by the replica's vote, reduced to the most of each number."""
        numbers = [rank.numbers for rank in ranks]
        votes = [self.replica.vote(each) for each in numbers]
        reduced = [max(column) for column in zip(*votes, strict=True)]
        return [self.replica.agree(reduced, each).mode is not Mode.EAGER for each in numbers]


class Rank:
    """What one rank runs in a step."""

    def __init__(self, kind: str, rng: random.Random, *, loras: int = 0) -> None:
        self.kind, self.tokens, self.num_reqs, self.longest = kind, 0, 0, 0
        self.too_many_adapters = bool(loras) and rng.random() < 0.2
        self.scheduled: Any = None
        self.numbers = BatchNumbers(0)
        if kind == "IDLE":
            return
        rows = [(int(rng.triangular(1, 300, 1)), rng.choice([0, 0, 7, 500])) for _ in range(rng.randint(1, 3))]
        rows = [] if kind == "DECODE" else rows
        decodes = {"DECODE": rng.randint(1, 70), "MIXED": rng.randint(1, 5)}.get(kind, 0)
        kv_len, logprobs = rng.randint(1, 3000), rng.random() < 0.08
        embeds, grammar = kind != "DECODE" and rng.random() < 0.05, kind == "DECODE" and rng.random() < 0.08
        facts = {
            "logprobs": logprobs, "input_embeds": embeds, "keep_decode": grammar,
            "lora_ineligible": self.too_many_adapters,
        }  # fmt: skip
        shape = BatchShape(
            decodes=[(1, decodes)] if decodes else [], prefills=rows, num_active_loras=rng.randint(0, loras),
            decode_kv_tokens=decodes * kv_len if decodes else None,
            facts={name: 1 for name, is_so in facts.items() if is_so},
        )  # fmt: skip
        self.numbers, self.tokens, self.num_reqs = shape.numbers, shape.num_tokens, shape.num_reqs
        self.longest = longest = shape.numbers.max_kv_len
        lengths = SimpleNamespace(max=lambda: SimpleNamespace(item=lambda: longest), numel=lambda: 1)
        self.scheduled = SimpleNamespace(
            forward_mode=getattr(MODES, kind), input_embeds=1 if embeds else None, replace_embeds=None,
            prefix_lens=[context for _, context in rows] + [kv_len - 1] * (decodes if kind == "MIXED" else 0),
            return_logprob=logprobs, has_grammar=grammar, reqs=[], batch_size=lambda: shape.num_reqs,
            multimodal_inputs=None, seq_lens_cpu=lengths,
        )  # fmt: skip


def test_ranks_decide_as_sglangs_do():
    """Over two and three ranks that decode, extend, mix or idle the replica replays where SGLang does: all or none."""
    real, rng, outcomes = Real(), random.Random(1), Counter()  # noqa: S311  not for secrets
    for _ in range(DEPLOYMENTS):
        deployment = Deployment(real, rng)
        for _ in range(STEPS):
            kinds = rng.choice([["DECODE", "DECODE", "IDLE"], ["EXTEND", "MIXED", "DECODE", "DECODE", "IDLE"],
                                ["EXTEND", "MIXED", "DECODE"]])  # fmt: skip
            ranks = [Rank(rng.choice(kinds), rng) for _ in range(rng.choice([2, 2, 3]))]
            if all(rank.kind == "IDLE" for rank in ranks):
                continue
            # An idle rank has nothing to replay, whatever is said of it.
            busy = [at for at, rank in enumerate(ranks) if rank.kind != "IDLE"]
            really, replica = deployment.really(ranks), deployment.by_replica(ranks)
            wanted, got = ([found[at] for at in busy] for found in (really, replica))
            assert got == wanted, [(rank.kind, rank.tokens) for rank in ranks]
            assert len(set(wanted)) == 1
            outcomes[wanted[0]] += 1
    assert min(outcomes.values()) > 1000, outcomes


def test_prompts_with_adapters():
    """Where LoRA is on, with graphs for it or none, the replica replays what SGLang's check at the step does."""
    real, rng, outcomes = Real(), random.Random(2), Counter()  # noqa: S311  not for secrets
    for _ in range(DEPLOYMENTS):
        deployment = Deployment(real, rng, loras=1.0)
        for _ in range(STEPS):
            rank = Rank(rng.choice(["EXTEND", "MIXED"]), rng, loras=2)
            really, replica = deployment.alone(rank)
            assert really == replica, rank.numbers
            outcomes[really, rank.numbers.num_active_loras > 0] += 1
    assert min(outcomes.values()) > 500, outcomes
