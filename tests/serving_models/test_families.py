"""Every family over paged KV against transformers' own forward and generate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.serving_models.families import EXPERTS, FAMILIES, LATENT

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.attention import LayerKind  # noqa: E402
from kpolicy.executors.step_model import StepContext  # noqa: E402
from kpolicy.serving.host_reads import HostReads  # noqa: E402
from tests.serving_models.driver import Driver, Row, run_mixed  # noqa: E402

Loaded = Callable[[str], Any]
TOLERANCE = 3e-4
"""Largest difference of a logit, float32; logits have a standard deviation of 0.4 to 2."""


@pytest.fixture(params=sorted(FAMILIES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_chunks_decodes_and_mixed_batches_give_the_reference_logits(
    name: str, loaded: Loaded, sequences: list[list[int]]
) -> None:
    """However a sequence is divided into steps, each token's logits are those of one whole forward."""
    model = loaded(name)
    for ids, logits in zip(sequences, run_mixed(Driver(model), sequences, seed=1), strict=True):
        torch.testing.assert_close(logits, model.reference_logits(ids), atol=TOLERANCE, rtol=0)


def test_greedy_tokens_are_those_of_generate(name: str, loaded: Loaded, sequences: list[list[int]]) -> None:
    """Teacher-forced on the tokens of generate, decode steps choose the same tokens."""
    model = loaded(name)
    driver = Driver(model)
    prompts = sequences[:3]
    wanted = [model.generate_reference(ids, 12) for ids in prompts]
    requests = [driver.request(ids, room=12) for ids in prompts]
    logits = [driver.step([Row(each, len(each.ids), False)])[0] for each in requests]
    found = [[int(model.sample(each[-1:], {}))] for each in logits]
    for step in range(11):
        for each, tokens in zip(requests, wanted, strict=True):
            each.ids.append(tokens[step])
        logits = driver.step([Row(each, 1, True) for each in requests], 4, 4, uniform=1)
        for each, tokens in zip(logits, found, strict=True):
            tokens.append(int(model.sample(each, {})))
    assert found == wanted
    assert len({token for tokens in wanted for token in tokens}) > 6  # no short cycle that hides attention


def test_padding_changes_no_bit_of_a_real_row_at_equal_shapes(name: str, loaded: Loaded) -> None:
    """What padding tokens are, and what the reserved slot holds, change nothing."""
    model = loaded(name)
    results = []
    # Another padding token goes to another expert, where it moves real tokens within a matrix product; there only the
    # slot changes.
    for token, slot in ((0, float("nan")), (0 if name in EXPERTS else 77, 1e30)):
        driver = Driver(model)
        for cache in model.kv_caches():
            cache[model.pad_slot] = slot
        first, second = driver.request(list(range(20)), room=4), driver.request(list(range(40, 53)), room=4)
        driver.step([Row(first, 20, False)], 24, 3)
        first.ids.append(5)
        tensors = driver.tensors([Row(first, 1, True), Row(second, 13, False)], 20, 4)
        tensors.token_ids[14:] = token
        hidden = model.forward(StepContext(tensors, None))
        assert torch.isfinite(hidden[:14]).all()
        results.append(hidden[:14].clone())
    assert torch.equal(*results)


def test_padding_rows_of_a_uniform_graph_give_no_nan(name: str, loaded: Loaded) -> None:
    """Rows without KV attend to nothing, so even the reserved slot's NaN doesn't reach their outputs."""
    model = loaded(name)
    driver = Driver(model)
    request = driver.request(list(range(30)), room=2)
    driver.step([Row(request, 28, False)])
    tensors = driver.tensors([Row(request, 1, True)], 4, 4, uniform=1)
    hidden = model.forward(StepContext(tensors, None, 1))
    assert torch.isfinite(hidden).all()


def test_uniform_decodes_of_several_tokens_give_the_reference_logits(
    name: str, loaded: Loaded, sequences: list[list[int]]
) -> None:
    """A verification step of three tokens a row, in a uniform launch, agrees with the whole forward."""
    model = loaded(name)
    driver = Driver(model)
    requests = [driver.request(ids) for ids in sequences]
    for each in requests:
        driver.step([Row(each, len(each.ids) - 3, False)])
    logits = driver.step([Row(each, 3, True) for each in requests], 18, 6, uniform=3)
    for each, found in zip(requests, logits, strict=True):
        torch.testing.assert_close(found, model.reference_logits(each.ids)[-3:], atol=TOLERANCE, rtol=0)


def test_a_row_is_the_same_whoever_else_is_in_the_batch(name: str, loaded: Loaded, sequences: list[list[int]]) -> None:
    """Other rows' lengths and tokens don't change a row's bits at an equal padded shape."""
    model = loaded(name)
    results = []
    for other in (1, 2, 3):
        driver = Driver(model)
        mine, beside = driver.request(sequences[0], room=1), driver.request(sequences[other], room=1)
        for each in (mine, beside):
            driver.step([Row(each, len(each.ids) - 1, False)])
        tensors = driver.tensors([Row(mine, 1, True), Row(beside, 1, True)], 4, 4, uniform=1)
        results.append(model.forward(StepContext(tensors, None, 1))[0].clone())
    # Sorting tokens by expert moves them within a matrix product, and with it the last bits; so does, on some
    # processors, the number of rows in the batched product that soft-capped scores come from.
    allowed = {"atol": 1e-5, "rtol": 0} if name in (*EXPERTS, "gemma2") else {"atol": 0, "rtol": 0}
    torch.testing.assert_close(results[0], results[1], **allowed)
    torch.testing.assert_close(results[0], results[2], **allowed)


def test_a_step_reads_nothing_on_the_host(name: str, loaded: Loaded) -> None:
    """No operator outside ours reads a tensor on the host or has a shape that depends on data."""
    model = loaded(name)
    driver = Driver(model)
    decode, prompt = driver.request(list(range(9)), room=1), driver.request(list(range(14)))
    driver.step([Row(decode, 8, False)])
    tensors = driver.tensors([Row(decode, 1, True), Row(prompt, 14, False)], 16, 4)
    sampling = {
        "temperature": torch.tensor([0.0, 1.0]), "seed": torch.tensor([1, 2]), "position": torch.tensor([9, 14]),
    }  # fmt: skip
    with HostReads() as watched:
        hidden = model.forward(StepContext(tensors, None))
        model.sample(model.head(hidden[:2]), sampling)
    assert watched.found == []


def test_written_kv_is_what_the_model_itself_caches(name: str, loaded: Loaded, sequences: list[list[int]]) -> None:
    """Each token's slot holds the keys and values, or the latent, that transformers' own cache gets for it."""
    from transformers import DynamicCache

    from kpolicy.serving.marks import own_forward

    model = loaded(name)
    driver, ids = Driver(model), sequences[2]
    request = driver.request(ids)
    for count in (11, 18, 1):
        driver.step([Row(request, count, False)], count + 3, 2)
    own, latents = DynamicCache(), []
    hooks = [
        module.register_forward_hook(lambda _module, _args, output: latents.append(output[0]))
        for path, module in model.hf.named_modules()
        if path.endswith("kv_a_layernorm")
    ]
    with torch.no_grad(), own_forward(model.hf):
        model.hf(input_ids=torch.tensor([ids]), past_key_values=own, use_cache=True)
    for hook in hooks:
        hook.remove()
    slots = [
        request.blocks[at // model.block_size] * model.block_size + at % model.block_size for at in range(len(ids))
    ]
    for index, (layer, theirs) in enumerate(zip(model.layers, own.layers, strict=True)):
        keys, values = theirs.keys[0].transpose(0, 1), theirs.values[0].transpose(0, 1)
        if name in LATENT:
            (cache,) = layer.caches
            # Some versions of transformers cache the roped key alone, some at the end of each head's key.
            rope = (values if keys.shape[-1] == layer.rank else keys)[:, 0, -layer.rope_dim :]
            pairs = [(cache[slots, : layer.rank], latents[index]), (cache[slots, layer.rank :], rope)]
        else:
            pairs = [(cache[slots], each) for cache, each in zip(layer.caches, (keys, values), strict=True)]
        for found, wanted in pairs:
            torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)
    for cache in model.kv_caches():
        others = sorted(set(range(model.num_slots)) - set(slots))
        assert not cache[others].any()


def _wrong_block(tensors: Any) -> None:
    tensors.block_table[0, 0] = tensors.block_table[0, 1]


def _missing_token(tensors: Any) -> None:
    tensors.kv_lens[0] -= 1


def _wrong_slot(tensors: Any) -> None:
    tensors.slot_mapping[0] += 1


@pytest.mark.parametrize("break_it", [_wrong_block, _missing_token, _wrong_slot])
def test_broken_attention_shows_in_the_logits(
    break_it: Callable[[Any], None], name: str, loaded: Loaded, sequences: list[list[int]]
) -> None:
    """A wrong block, a missing KV token or a token written elsewhere moves logits far beyond the tolerance."""
    model = loaded(name)
    driver, ids = Driver(model), sequences[0][:7]
    request = driver.request(ids)
    driver.step([Row(request, 6, False)])
    tensors = driver.tensors([Row(request, 1, True)])
    break_it(tensors)
    found = model.head(model.forward(StepContext(tensors, None)))[0]
    assert not (found - model.reference_logits(ids)[-1]).abs().max() < 100 * TOLERANCE


def test_support_says_what_the_kernels_can_have_captured(name: str, loaded: Loaded) -> None:
    """Attention with one computation can be captured in mixed batches; MLA, with two, in uniform ones."""
    support = loaded(name).support
    claims = support.claims
    assert claims.piecewise
    assert claims.one_computation == claims.mixed == (name not in LATENT)
    assert claims.uniform_query_len > 8
    kinds = {origin.kind for origin in support.origins}
    assert (LayerKind.SLIDING_WINDOW in kinds) == (name in ("mistral", "gemma2", "gemma3"))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_steps_run_under_any_grad_mode(mode: Any, loaded: Loaded) -> None:
    """Whatever grad mode the launcher is in, a step gives the same."""
    model = loaded("llama")
    driver = Driver(model)
    with mode():
        (logits,) = driver.step([Row(driver.request(list(range(20))), 20, False)])
    assert not logits.requires_grad
    torch.testing.assert_close(logits.clone(), model.reference_logits(list(range(20))), atol=TOLERANCE, rtol=0)
