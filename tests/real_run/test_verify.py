"""The checks against EAGER find what is wrong, and change nothing."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.serving import verify  # noqa: E402
from kpolicy.serving.real_run import Serving, serve_model  # noqa: E402
from kpolicy.serving.rows import RowGroup  # noqa: E402
from kpolicy.trace_run import Prompts, RunResult  # noqa: E402
from tests.executors_launcher.checker import leaking  # noqa: E402
from tests.real_run.helpers import some  # noqa: E402


class Corrupting:
    """A launcher whose replays are wrong in one way, from the n-th on."""

    def __init__(self, launcher: Any, model: Any, what: str, at: int = 5) -> None:
        self._launcher = launcher
        self._model = model
        self._what = what
        self._left = at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launcher, name)

    def replay(self, handle: Any, rows: Any, launch: Any) -> Any:
        part = self._launcher.replay(handle, rows, launch)
        self._left -= 1
        if self._left > 0:
            return part
        if self._what in ("kv", "stray"):
            own = set(rows.slot_mapping)
            other = next(slot for slot in range(self._model.num_slots) if slot not in own)
            with torch.no_grad():
                slot = list(rows.slot_mapping)[-1] if self._what == "kv" else other
                self._model.kv_caches()[-1][slot, 0, 0] += 1e-4
            return part
        return part._replace(outputs=[logits + 1e-6 for logits in part.outputs])


def serve(serving: Serving, what: str = "") -> tuple[RunResult, tuple[str, ...]]:
    engine = serving.engine("full_and_piecewise")
    engine.capture()
    if what:
        executor: Any = engine.executor
        executor.launcher = Corrupting(executor.launcher, serving.model, what)
    return serve_model(some(), engine, serving, Prompts(seed=1, vocab=97))


@pytest.mark.parametrize(("what", "said"), [("logits", "logits"), ("kv", "kv"), ("stray", "KV of no row of its own")])
def test_corruption_is_found(serving: Serving, what: str, said: str) -> None:
    """A changed logit or KV entry, its own or another request's, is a failure said with step, launch and size."""
    result, differences = serve(serving, what)
    assert sum(each.failures for each in result.verified.values()) > 0
    assert any(said in difference for difference in differences)
    assert all(difference.startswith("step ") for difference in differences)


def test_a_stray_write_after_the_last_check_is_found(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """What steps between checks wrote elsewhere shows at the next check, or at the end."""
    monkeypatch.setattr(verify.Verifier.__init__, "__kwdefaults__", {"least": 1, "every": 10_000})
    result, differences = serve(serving, "stray")
    assert sum(each.checks for each in result.verified.values()) <= len(result.modes)
    assert any("KV of no row of its own" in each for each in differences)
    assert sum(each.failures for each in result.verified.values()) > 0


def test_attention_that_reads_padding_is_found(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that reads the pad slot has NaN, though padding wrote there before and EAGER reads it too."""
    monkeypatch.setattr(RowGroup, "slots", leaking(RowGroup.slots, serving.model.pad_slot))
    result, _ = serve(serving)
    padded = {mode: each for mode, each in result.verified.items() if result.modes[mode].padding}
    assert padded
    assert all(each.failures == each.checks for each in result.verified.values())


def test_padding_that_leaks_is_found(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that reads the pad slot has NaN in its logits, which is a failure even where EAGER has it too."""
    model = serving.model
    forward = type(model).forward

    def leaking(self: Any, step: Any) -> Any:
        return forward(self, step) + 0 * self.kv_caches()[0][self.pad_slot, 0, 0]

    monkeypatch.setattr(type(model), "forward", leaking)
    result, differences = serve(serving)
    assert sum(each.failures for each in result.verified.values()) > 0
    assert any("logits differ" in each and "nan" in each for each in differences)


def test_checks_change_nothing(serving: Serving) -> None:
    """Tokens and steps are the same with checks and without."""
    kept: list[dict[int, list[int]]] = []
    for checked in (True, False):
        each = attrs.evolve(serving, verify=checked)
        engine = each.engine("piecewise")
        engine.capture()
        tokens: dict[int, list[int]] = {}

        def keep(request: Any, tokens: dict[int, list[int]] = tokens) -> bool:
            tokens[request.index] = request.generated
            return True

        result, _ = serve_model(some(), engine, each, Prompts(seed=1, vocab=97), check=keep)
        assert bool(result.verified) is checked
        kept.append(tokens)
        engine.release()
    assert kept[0] == kept[1]


def test_nan_behind_the_first_cache_is_a_difference() -> None:
    """KV that isn't finite in any cache counts, whatever the caches before it hold."""
    same = torch.ones(2, 3)
    broken = torch.full((2, 3), float("nan"))
    assert verify.largest_of([(same, same), (same, broken)]) != 0.0
    assert math.isnan(verify.largest_of([(same, same), (same, broken), (same, same)]))
    assert verify.largest_of([(same, same + 2), (same, same)]) == 2.0
