"""The SGLang replica against SGLang's own rule, out of an unpacked wheel."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

import attrs
import pytest

from kpolicy.attention import Claims
from kpolicy.costs import H200, LLAMA_8B, analytic_costs
from kpolicy.ladders import CaptureLadder, CaptureSizes
from kpolicy.modes import Mode
from kpolicy.policies.base import PolicyContext
from kpolicy.policies.sglang import SglangPolicy, decode_sizes, prefill_sizes
from kpolicy.settings import Settings
from kpolicy.shapes import BatchShape
from tests.oracle.sglang_real import FOLDER, MARKS, Release, decode_runner, prefill_runner, size_lists

BATCHES = 20_000
DEPLOYMENTS = 100

pytestmark = MARKS


@pytest.fixture(scope="module")
def release():
    """The unpacked wheel."""
    return Release(FOLDER)


def compiled(policy, settings, sizes):
    """The policy's per-batch path, with everything it plans captured."""
    claims = Claims.at_level("mixed")
    ladder = CaptureLadder(policy.plan(sizes, claims, settings))
    costs = analytic_costs(LLAMA_8B, H200)
    return policy.compile(PolicyContext(claims=claims, ladder=ladder, costs=costs, settings=settings)).select


def random_sizes(rng, most):
    """A rising list of up to a dozen sizes."""
    return tuple(sorted(rng.sample(range(1, most + 1), rng.randint(1, 12))))


def prefill_pair(release, rng):
    """The replica and SGLang's runner for one random deployment."""
    settings = Settings(max_num_reqs=64, max_num_tokens=4096)
    full = rng.random() < 0.4
    policy = SglangPolicy(
        prefill="full" if full else "breakable",
        request_slots=rng.choice([0, 3, 8]),
        prefix_chunks=full and rng.random() < 0.5,
        metadata_reqs=rng.choice([0, 0, 5]),
        max_seq_len=rng.choice([0, 0, 2000]),
        hidden_states=rng.randint(0, 2),
        multimodal_eager=rng.random() < 0.3,
        eager_mixed=rng.random() < 0.3,
        mha_companion=not full and rng.random() < 0.3,
    )
    sizes = random_sizes(rng, 1024) if rng.random() < 0.7 else prefill_sizes(1024)
    select = compiled(policy, settings, CaptureSizes((1,), sizes, sizes))
    runner = prefill_runner(release, cuda=not policy.mha_companion)()
    runner.__dict__.update(
        _qwen_bcg_hc_sidechannel=policy.multimodal_eager,
        _qwen_bcg_mtp_draft=False,
        _is_full_backend=full,
        _fa4_prefill=False,
        _capture_req_slots=policy.slots(settings) if full else 1,
        _captured_attn_metadata_max_bs=policy.metadata_reqs or None,
        prefer_eager_mixed_prefill=policy.eager_mixed,
        prefill_backend_name=policy.prefill,
        has_mha_companion_layers=policy.mha_companion,
        _attn_backend_is_dsa=False,
        _capture_chunked_prefix=policy.prefix_chunks,
        _prefix_chunk_len=settings.max_num_tokens // policy.slots(settings),
        _prefix_capture_variants=type(runner).variants,
        capture_hidden_mode=policy.hidden_states,
        max_context_size=None,
        max_seq_len=policy.max_seq_len or None,
        max_num_tokens=sizes[-1],
        capture_num_tokens=list(sizes),
    )
    return select, runner


def prefill_batch(rng):
    """A random batch with prefill rows: the shape, and what SGLang's rule takes."""
    rows = [(int(rng.triangular(1, 700, 1)), rng.choice([0, 0, 0, 7, 500, 9000])) for _ in range(rng.randint(1, 6))]
    num_decodes = rng.choice([0, 0, 1, 5])
    kv_len = rng.randint(1, 3000)
    fact = {
        name: 1
        for name in ("input_embeds", "replace_embeds", "multimodal", "target_verify", "lora_ineligible", "logprobs")
        if rng.random() < 0.06
    }
    prefixes = [context for _, context in rows] + [kv_len - 1] * num_decodes
    fact |= {"hidden_states": rng.choice([0, 0, 0, 1, 2]), "longest_prefix": max(prefixes)}
    decodes = [(1, num_decodes)] if num_decodes else []
    shape = BatchShape(
        decodes=decodes, prefills=rows, decode_kv_tokens=num_decodes * kv_len if num_decodes else None, facts=fact
    )
    return shape, {
        "batch_size": shape.num_reqs,
        "num_tokens": shape.num_tokens,
        "input_embeds": fact.get("input_embeds"),
        "replace_embeds": fact.get("replace_embeds"),
        "prefix_lens": prefixes,
        "is_target_verify": "target_verify" in fact,
        "capture_hidden_mode": fact["hidden_states"],
        "return_logprob": "logprobs" in fact,
        "lora_ineligible": "lora_ineligible" in fact,
        "is_mixed": num_decodes > 0,
        "batch_max_context_len": shape.numbers.max_kv_len,
        "contains_mm_inputs": "multimodal" in fact,
    }


def test_prefill_rule(release):
    """On 20,000 random batches the replica replays when SGLang does, in the bucket that SGLang pads to."""
    rng = random.Random(23)  # noqa: S311  not for secrets
    outcomes = Counter()
    for _ in range(DEPLOYMENTS):
        select, runner = prefill_pair(release, rng)
        for _ in range(BATCHES // DEPLOYMENTS):
            shape, arguments = prefill_batch(rng)
            decision = select(*shape.numbers)
            replays = runner.can_replay_locally(**arguments)
            assert (decision.mode is not Mode.EAGER) == replays, f"{shape} {arguments}: {decision}"
            if replays:
                bucket = runner._pad_to_bucket(shape.num_tokens, runner.capture_num_tokens)
                assert decision.keys[0].num_tokens == bucket, f"{shape}: {decision}"
            outcomes[decision.reason] += 1
    assert sum(outcomes.values()) == BATCHES
    assert min(outcomes["graph_fits"], outcomes["padding_over_limit"], outcomes["above_largest_size"]) > 300, outcomes
    assert len(outcomes) >= 12, outcomes


def test_decode_rule(release):
    """On 20,000 random decode batches the replica replays when SGLang does, and LoRA batches the graph for them."""
    rng = random.Random(5)  # noqa: S311  not for secrets
    outcomes, labels = Counter(), Counter()
    for _ in range(DEPLOYMENTS):
        width, padding, overlap = rng.choice([1, 1, 4]), rng.random() < 0.7, rng.random() < 0.3
        loras = rng.choice([0, 0, 1, 4])
        settings = Settings(max_num_reqs=256, max_num_tokens=4096, num_speculative_tokens=width - 1, max_loras=loras)
        rows = random_sizes(rng, 200)
        labelled = {(size, label) for size in rows for label in ("lora", "nolora")}
        policy = SglangPolicy(padding=padding, two_batch_overlap=overlap)
        select = compiled(policy, settings, CaptureSizes(tuple(size * width for size in rows)))
        runner = decode_runner(release)()
        runner.__dict__.update(
            ragged_verify_mode=False,
            captured_req_width=width,
            require_mlp_tp_gather=False,
            require_mlp_sync=False,
            enable_pdmux=False,
            disable_padding=not padding,
            backend=SimpleNamespace(can_run=lambda _, key, graphs={*rows, *labelled}: key in graphs),
            record_nolora_graph=loras > 0,
            max_bs=rows[-1],
            is_encoder_decoder=True,
            enable_two_batch_overlap=overlap,
            model_runner=SimpleNamespace(spec_algorithm=SimpleNamespace(is_ngram=lambda: False)),
        )
        for _ in range(BATCHES // DEPLOYMENTS):
            num_reqs, drafts = rng.randint(1, 220), rng.choice([width, width, width, 2])
            fact = {
                name: 1 for name in ("replace_embeds", "encoder_lens_zero", "cannot_overlap") if rng.random() < 0.05
            }
            batch = SimpleNamespace(
                replace_embeds=fact.get("replace_embeds"),
                spec_info=SimpleNamespace(num_tokens_per_req=drafts),
                batch_size=num_reqs,
                can_run_tbo="cannot_overlap" not in fact,
            )
            batch.encoder_lens = 0 if "encoder_lens_zero" in fact else 1
            active = rng.randint(0, loras)
            batch.lora_ids = [None] + [str(each) for each in range(active)]
            shape = BatchShape.decode(num_reqs, query_len=drafts, facts=fact)
            shape = attrs.evolve(shape, num_active_loras=active)
            decision = select(*shape.numbers)
            replays = runner.can_run_graph(batch)
            assert (decision.mode is Mode.FULL) == bool(replays), f"{num_reqs} x {drafts} {fact}: {decision}"
            if replays and loras:
                label = "lora" if decision.keys[0].lora_case else "nolora"
                assert label == runner._resolve_lora_variant(batch)
                labels[label] += 1
            outcomes[decision.reason] += 1
    assert sum(outcomes.values()) == BATCHES
    assert len(outcomes) == 7, outcomes
    assert min(labels["lora"], labels["nolora"]) > 500, labels


@pytest.mark.parametrize("max_reqs", [1, 5, 8, 48, 100, 160, 256, 511, 512, 1000])
@pytest.mark.parametrize(("speculative", "padding"), [(False, True), (True, True), (False, False)])
def test_decode_sizes(release, max_reqs, speculative, padding):
    """The default decode sizes are those that SGLang generates."""
    generate, _ = size_lists(release)
    options = SimpleNamespace(
        disable_cuda_graph_padding=not padding, speculative_algorithm="EAGLE" if speculative else None
    )
    assert list(decode_sizes(max_reqs, speculative=speculative, padding=padding)) == generate(options, max_reqs)


@pytest.mark.parametrize("max_tokens", [3, 4, 100, 2048, 8192, 16384, 20000])
def test_prefill_sizes(release, max_tokens):
    """The default prefill sizes are those that SGLang generates."""
    _, generate = size_lists(release)
    assert list(prefill_sizes(max_tokens)) == generate(max_tokens)
