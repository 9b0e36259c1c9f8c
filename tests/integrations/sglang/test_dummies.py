"""The dummy batches that costs are measured with."""

from types import SimpleNamespace

import pytest

from kpolicy.costs import Curve
from kpolicy_sglang import bench as timing
from kpolicy_sglang import calibrate
from kpolicy_sglang.bench import MIXED_KV, MOST_RUNS, Bench
from kpolicy_sglang.calibrate import _beside
from kpolicy_sglang.config import Config
from kpolicy_sglang.phase import PREFILL, PROMPT_TOKENS, Phase
from kpolicy_sglang.prompt_times import length_of
from kpolicy_sglang.ranks import Ranks
from kpolicy_sglang.state import State

torch = pytest.importorskip("torch")


class Prefill:
    """Makes SGLang's dummy of one prompt."""

    prefill_backend_name = "breakable"

    def capture_prepare(self, num_tokens):
        batch = SimpleNamespace(
            forward_mode=Mode("EXTEND"), batch_size=1, seq_lens=torch.tensor([num_tokens]), input_ids=range(num_tokens),
            extend_seq_lens_cpu=[num_tokens], extend_num_tokens=num_tokens,
        )  # fmt: skip
        return batch, None


class Mode(str):
    """A forward mode, whose class has them all."""

    MIXED = "MIXED"


def bench(*, pool=64, backend="breakable"):
    prefill = Prefill()
    prefill.prefill_backend_name = backend
    runner = SimpleNamespace(
        decode_cuda_graph_runner=None, prefill_cuda_graph_runner=prefill, device="cpu",
        req_to_token_pool=SimpleNamespace(size=pool), server_args=SimpleNamespace(tp_size=1),
    )  # fmt: skip
    return Bench(runner, Ranks(runner))


class Device:
    """A device that notes when it is waited for."""

    def __init__(self, seen):
        self.seen = seen

    def synchronize(self):
        self.seen.append("synchronized")


def test_a_step_is_timed_until_the_device_is_done():
    """The device is idle before and done after; questions are answered as told meanwhile, and as ever afterwards."""
    made, seen = bench(), []
    phase = Phase(PREFILL, (64,), 64, full=False)
    made._device = Device(seen)
    made._runner.forward = lambda batch: seen.append((batch, phase.force))
    made.add(phase, lambda: "dummy", True)
    made.run(60)
    assert seen == ["synchronized", ("dummy", True), "synchronized"] * MOST_RUNS
    assert phase.force is None
    assert len(made._times[0]) == MOST_RUNS

    def fails(_batch):
        raise RuntimeError("illegal access")

    made._runner.forward = fails
    made.run(60)
    assert phase.force is None


@pytest.mark.parametrize(("times", "us"), [([9.0, 1.0], 1.0), ([9.0, 1.0, 2.0], 1.0), ([9.0, 3.0, 1.0, 2.0], 2.0)])
def test_what_a_case_takes(times, us):
    """The lower of two; of more the median, without the first call."""
    made = bench()
    case = made.add(Phase(PREFILL, (64,), 64, full=False), lambda: None, None)
    assert made.us({64: case}) == {}
    made._times[case] = times
    assert made.us({64: case}) == {64: us}


def lengths(batch):
    """New tokens of each row; what else says so has to agree."""
    found = list(batch.extend_seq_lens_cpu)
    if batch.batch_size > 1:
        assert batch.extend_seq_lens.tolist() == found
        assert batch.extend_start_loc.tolist() == [sum(found[:row]) for row in range(len(found))]
        assert (batch.seq_lens - batch.extend_prefix_lens).tolist() == found
        assert batch.seq_lens_sum == sum(batch.seq_lens_cpu.tolist())
        assert batch.req_pool_indices.tolist() == list(range(len(found)))
        assert sum(found) == batch.extend_num_tokens == len(batch.input_ids)
    assert batch.batch_size == len(found)
    return found


@pytest.mark.parametrize(
    ("tokens", "pool", "rows"),
    [(64, 64, [64]), (1024, 64, [1024]), (1280, 64, [640, 640]), (8192, 64, [1024] * 8),
     (4097, 64, [820, 820, 819, 819, 819]), (8192, 3, [2731, 2731, 2730]), (8192, 1, [8192])],
)  # fmt: skip
def test_prompt_steps_have_several_prompts(tokens, pool, rows):
    """As few as are no longer than a usual one, and no more than SGLang has slots for."""
    batch = bench(pool=pool).prefill(tokens)
    assert lengths(batch) == rows
    assert batch.forward_mode == "EXTEND"


def test_one_long_prompt_stays_one():
    """What attention to a long prompt takes is measured with it, and FULL prefill graphs keep the rows they have."""
    assert lengths(bench().prompt(8192)) == [8192]
    assert lengths(bench(backend="full").prefill(8192)) == [8192]


@pytest.mark.parametrize(
    ("tokens", "pool", "backend", "rows"),
    [(8192, 64, "breakable", [4096, *[1024] * 4]), (5000, 64, "breakable", [2500, 834, 833, 833]),
     (8192, 3, "breakable", [4096, 2048, 2048])],
)  # fmt: skip
def test_a_long_prompt_has_usual_ones_beside_it(tokens, pool, backend, rows):
    """Half of the tokens are one prompt's."""
    assert lengths(bench(pool=pool, backend=backend).beside(tokens)) == rows


@pytest.mark.parametrize(("tokens", "pool", "backend"), [(8192, 64, "full"), (1024, 64, "breakable"), (8192, 1, "")])
def test_nothing_is_beside_where_there_is_one_row(tokens, pool, backend):
    """Then such a batch isn't timed."""
    assert bench(pool=pool, backend=backend).unlike(tokens) == [tokens]


@pytest.mark.parametrize(("beside_us", "share"), [(16_000.0, 0.0), (24_000.0, 0.5), (33_000.0, 1.0), (None, 0.0)])
def test_what_is_beside_a_long_prompt_is_told(beside_us, share):
    """By the same number of tokens in usual prompts, in one, and in one half as long with usual ones."""
    made, ours = bench(), []
    phase = Phase(PREFILL, (8192,), 8192, full=False)
    for us in (12_000.0, 40_000.0, beside_us):
        ours.append({8192: made.add(phase, lambda: None, None)})
        made._times[-1] = [] if us is None else [us] * 3
    cases = {(PREFILL, kind): case for kind, case in zip(("graph", "long", "beside"), ours, strict=True)}
    found = _beside(made, cases, Curve((4096, 8192), (20_000.0, 40_000.0)))
    assert found == pytest.approx(share, abs=0.05)
    assert _beside(made, cases, None) == _beside(made, {}, None) == 0.0


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_measuring_finds_how_far_a_long_prompt_reaches(monkeypatch, share):
    """From the cases to the state, with steps that take what such a kernel does."""
    now_s = 0.0

    def forward(batch):
        nonlocal now_s
        new = batch.extend_seq_lens_cpu
        now_s += 0.004 + sum(new) * (1e-6 + 4e-10 * length_of(new, [0] * len(new), share))

    runner = bench()._runner
    runner.forward = forward
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now_s)
    state = State(Config(split=False, calibrate_seconds=5), "0.5.16")
    state.phases[PREFILL] = Phase(PREFILL, (64, 1024, 2048, 4096, 8192), 8192, full=False)
    calibrate.measure(runner, state, Ranks(runner))
    assert state.beside == pytest.approx(share, abs=0.01)
    assert state.long.sizes == (2048, 4096, 8192)


def test_mixed_batches_have_decodes_behind_their_prompts():
    """Decode rows come last, with tokens in KV."""
    batch = bench().mixed(2080, decodes=32)
    assert lengths(batch) == [1024, 1024] + [1] * 32
    assert batch.extend_prefix_lens.tolist() == [0, 0] + [MIXED_KV] * 32
    assert batch.forward_mode == Mode.MIXED
    assert max(lengths(bench().mixed(514, decodes=2))) <= PROMPT_TOKENS
