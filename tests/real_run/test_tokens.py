"""When a token counts as wrong: by EAGER's own error, measured, and not by a number somebody chose."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import attrs  # noqa: E402

from kpolicy.serving.real_run import Serving, serve_model  # noqa: E402
from kpolicy.serving.rows import RowGroup  # noqa: E402
from kpolicy.trace_run import Prompts  # noqa: E402
from tests.real_run import helpers  # noqa: E402
from tests.real_run.helpers import eager_error, right, some  # noqa: E402

PROMPT = [5, 9, 11, 3, 70, 21]


def test_eagers_error_is_that_of_float32(model: Any) -> None:
    """It isn't nothing, and far below what tells two tokens apart: the reference is another, finer computation."""
    generated = model.generate_reference(PROMPT, 20)
    logits = model.reference_logits([*PROMPT, *generated])
    error = eager_error(model, PROMPT, generated)
    assert 0 < error < 1e-5 * float(logits.abs().max())


def test_another_token_is_wrong_and_the_same_are_right(model: Any) -> None:
    """One token that the reference doesn't nearly choose is enough."""
    generated = model.generate_reference(PROMPT, 12)
    assert right(model, PROMPT, generated)
    second = int(model.reference_logits([*PROMPT, *generated])[len(PROMPT) + 4].argsort()[-2])
    assert not right(model, PROMPT, [*generated[:5], second, *generated[6:]])


def test_a_token_within_eagers_error_is_right(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the reference's margin is within twice EAGER's error, either token may come; just above, it may not."""
    generated = model.generate_reference(PROMPT, 4)
    logits = model.reference_logits([*PROMPT, *generated])[len(PROMPT) + 2]
    best, second = logits.sort(descending=True).values[:2].tolist()
    other = [*generated[:3], int(logits.argsort()[-2])]
    for share, said in ((0.51, True), (0.49, False)):
        monkeypatch.setattr(helpers, "eager_error", lambda *_, share=share: share * (best - second))
        assert right(model, PROMPT, other) is said


def test_broken_attention_gives_wrong_tokens(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that doesn't see each row's first token is equal in every mode, and the tokens show it."""
    slots = RowGroup.slots

    def forgets(group: Any, *rest: Any) -> tuple[Any, Any]:
        read, seen = slots(group, *rest)
        first = torch.zeros_like(seen)
        first[..., 0] = seen.sum(-1) > 1
        return read, seen & ~first

    each = attrs.evolve(serving, verify=False)
    engine = each.engine("full_and_piecewise")
    engine.capture()

    def check(request: Any) -> bool:
        with monkeypatch.context() as whole:
            whole.setattr(RowGroup, "slots", slots)
            return right(each.model, request.tokens[: request.num_prompt].tolist(), request.generated)

    monkeypatch.setattr(RowGroup, "slots", forgets)
    result, _ = serve_model(some(), engine, each, Prompts(seed=5, vocab=97), check=check)
    engine.release()
    assert len(result.wrong) > result.served // 2
