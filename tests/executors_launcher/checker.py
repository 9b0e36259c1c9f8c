"""Random steps of a model in every mode, each held bit for bit to the same rows run eagerly at the same padded shape.

Shared with `benchmarks/random_steps.py`.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kpolicy.decision import Decision, Launch
from kpolicy.engine import Engine
from kpolicy.executors.base import StepInputs, StepOutputs
from kpolicy.executors.cpu import CpuExecutor
from kpolicy.executors.runner import part_of
from kpolicy.keys import GraphKey
from kpolicy.modes import Mode, Rows
from kpolicy.reasons import Reason
from kpolicy.registry import GraphRegistry
from kpolicy.scheduling.batching import Batcher, Generation
from kpolicy.settings import Settings
from kpolicy.testing.sequences import Sequences
from tests.executors_launcher.choosing import DRAFTING, PLAIN, Chooser, all_keys, label

LIMITS = DRAFTING
NUM_BLOCKS, BLOCK_SIZE = 64, 4
MAX_MODEL_LEN = 96
EAGER = Decision(Mode.EAGER, (Launch(Rows.ALL, None),), Reason.POLICY_IS_EAGER)


def load_family(name: str) -> Any:
    """A family's tiny model over a small KV, with NaN in the reserved slot whenever attention reads."""
    from kpolicy.serving.load import load
    from tests.serving_models.families import FAMILIES

    model = load(
        FAMILIES[name], num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN,
        max_num_reqs=LIMITS.max_num_reqs,
    )  # fmt: skip
    model.poison_padding()
    return model


def plan(model: Any) -> tuple[GraphKey, ...]:
    """Graphs of each kind that the model's attention admits, in several sizes, and those that policies plan."""
    return all_keys(model.support.claims)


def opened(model: Any, keys: Sequence[GraphKey] | None = None, **options: Any) -> tuple[CpuExecutor, GraphRegistry]:
    """A CPU executor over the model with those keys captured; all of `plan` by default."""
    executor, registry = CpuExecutor(model, check=True, **options), GraphRegistry()
    keys = plan(model) if keys is None else keys
    registry.plan(keys)
    executor.open(registry)
    executor.capture(keys)
    return executor, registry


def kept_by_outputs(make: Callable[[Any], Any], policy: str, family: str = "llama") -> list[str]:
    """What somebody who holds a step's outputs keeps, once the Engine is released and forgotten.

    Args:
        make: an executor for the model.
        policy: of the Engine.
        family: of the model.
    """

    def stepped() -> tuple[StepOutputs, dict[str, Any]]:
        model = load_family(family)
        executor, settings = make(model), Settings(max_num_reqs=4, max_num_tokens=32)
        engine = Engine(policy, executor=executor, settings=settings, calibrate=0, ladder=[4, 8])
        engine.capture()
        batcher = Batcher(settings, num_blocks=8)
        batcher.add(Generation(0, [3, 5, 7], 2))
        batch = batcher.next_batch()
        assert batch is not None
        outputs = engine.step(batch.inputs)
        outputs.outputs[0].tolist()
        refs = {"model": weakref.ref(model), "adapter": weakref.ref(executor.adapter)}
        engine.release()
        return outputs, refs

    outputs, refs = stepped()
    gc.collect()
    kept = [name for name, ref in refs.items() if ref() is not None]
    assert outputs.ready[0].done()
    return kept


def eager_part(executor: CpuExecutor, launch: Launch, inputs: StepInputs) -> Any:
    """A launch's rows eagerly, alone, at exactly the padded shape that the launch has."""
    rows = inputs if launch.rows is Rows.ALL else part_of(inputs, launch.rows)
    launcher: Any = executor.launcher
    if launch.key is not None:
        return launcher.eager_as(launch.key, rows, launch.rows, repeat=launch.repeat)
    launcher.start(EAGER)
    return launcher.eager(rows, Launch(launch.rows, None, padded_tokens=launch.padded_tokens))


class Checker:
    """Holds an executor's steps to eager ones.

    Args:
        executor: a CPU executor over the model.
        model: whose KV is compared.

    Attributes:
        steps: how many were held to eager ones, by way.
        policies: how many of these a policy decided, by policy and way.
        rows: logits compared.
        failure: what ended the steps, for who notes it.
    """

    def __init__(self, executor: CpuExecutor, model: Any) -> None:
        self.executor = executor
        self.model = model
        self.steps: Counter[str] = Counter()
        self.policies: dict[str, Counter[str]] = {}
        self.rows = 0
        self.failure = ""

    def chooser(self, keys: Sequence[GraphKey], settings: Settings, rng: random.Random) -> Chooser:
        """What chooses the steps' ways, from those that this checker has seen least."""
        return Chooser(self.model.support.claims, keys, settings, rng, Counter(self.steps), self.policies)

    def step(self, decision: Decision, inputs: StepInputs) -> StepOutputs:
        """Run a step, and its launches again eagerly from the same KV; the step's outputs and KV stay.

        Raises:
            AssertionError: a bit of the logits or of the KV differs, a token does, or KV of no row of the step changed.
        """
        caches = self.model.kv_caches()
        self.model.poison_pad_slot()
        before = [cache[:-1].clone() for cache in caches]
        outputs = self.executor.run(decision, inputs)
        ran = list(outputs.outputs)
        tokens, first = [list(each) for each in outputs.tokens], list(outputs.first_tokens)
        for event in outputs.ready:
            event.wait()  # a half without wanted rows is waited for by nobody else
        after = [cache[:-1].clone() for cache in caches]
        untouched = torch.ones(self.model.num_slots, dtype=torch.bool)
        untouched[[*inputs.slot_mapping, *(slot for slots in inputs.slots_ahead for slot in slots)]] = False
        for cache, old in zip(after, before, strict=True):
            assert torch.equal(cache[untouched], old[untouched]), f"{decision} changed KV of no row of its own"
        self._put_back(before)
        parts = [eager_part(self.executor, launch, inputs) for launch in decision.launches]
        wanted = [row for part in parts for row in part.outputs]
        assert len(ran) == len(wanted) == len(inputs.wanted), f"{decision}: {len(ran)} outputs"
        for i, (mine, eager) in enumerate(zip(ran, wanted, strict=True)):
            assert torch.isfinite(mine).all(), f"{decision}: output {i} isn't finite"
            assert torch.equal(mine, eager), f"{decision}: output {i} is off by {(mine - eager).abs().max()}"
        assert tokens == [list(each) for each in parts[0].tokens], f"{decision}: tokens"
        assert first == [token for part in parts for token in part.first_tokens], f"{decision}: first tokens"
        for cache, mine in zip(caches, after, strict=True):
            assert torch.equal(cache[:-1], mine), f"{decision} wrote other KV than eagerly"
        self.steps[label(decision)] += 1
        self.rows += len(wanted)
        return outputs

    def _put_back(self, kv: Sequence[Any]) -> None:
        self.model.poison_pad_slot()
        for cache, old in zip(self.model.kv_caches(), kv, strict=True):
            cache[:-1] = old


def leaking(slots: Any, pad_slot: int) -> Any:
    """`RowGroup.slots` of an attention that reads and sees the reserved slot behind each row's end."""

    def leaks(group: Any, at: Any, window: int, device: Any) -> tuple[Any, Any]:
        read, seen = slots(group, at, window, device)
        behind = ~seen[:, -1]
        return torch.where(behind, torch.full_like(read, pad_slot), read), seen | behind[:, None]

    return leaks


def with_sampling(inputs: StepInputs, rng: random.Random) -> StepInputs:
    """The step with some warm rows."""
    count = len(inputs.wanted)
    temperature = [rng.choice([0.0, 0.7, 1.3]) for _ in range(count)]
    return inputs._replace(
        sampling={"temperature": temperature, "seed": [rng.randrange(1 << 40) for _ in range(count)]}
    )


def batcher_steps(checker: Checker, keys: Sequence[GraphKey], steps: int, seed: int) -> Iterator[Decision]:
    """Steps of the real batcher over random requests, each run as `Chooser` says."""
    rng = random.Random(seed)  # noqa: S311
    chooser = checker.chooser(keys, PLAIN, rng)
    batcher = Batcher(PLAIN, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, steps_ahead=5)
    added = 0
    for _ in range(steps):
        while len(batcher.waiting) < 2:
            prompt = [rng.randrange(128) for _ in range(rng.choice([1, 3, 7, 20, 40]))]
            batcher.add(Generation(added, prompt, rng.randint(1, 20)))
            added += 1
        batch = batcher.next_batch()
        assert batch is not None
        inputs = with_sampling(batch.inputs, rng) if rng.random() < 0.3 else batch.inputs
        decision = chooser.choose(inputs.numbers)
        outputs = checker.step(decision, inputs)
        batcher.complete(batch, outputs, lambda row: int(row.argmax()))
        yield decision


def drafting_steps(checker: Checker, keys: Sequence[GraphKey], steps: int, seed: int) -> Iterator[Decision]:
    """Steps with decode rows of 1 to 3 tokens, equal or not, some of whose drafts are refused."""
    sequences = Sequences(seed, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, vocab=128)
    rng = sequences.random
    chooser = checker.chooser(keys, DRAFTING, rng)
    for _ in range(steps):
        rows = sequences.random_rows(LIMITS.max_num_reqs, LIMITS.max_num_tokens, LIMITS.query_len)
        inputs = sequences.inputs(rows)
        if rng.random() < 0.3:
            inputs = with_sampling(inputs, rng)
        decision = chooser.choose(inputs.numbers)
        checker.step(decision, inputs)
        sequences.advance(rows, accepted=rng.choice([None, 1, 2]))
        yield decision
