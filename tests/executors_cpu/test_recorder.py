"""The recorder on models: replays are eager runs to the bit, and memory is shared and freed."""

from __future__ import annotations

import threading
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

from kpolicy.errors import CaptureError, GraphReplayError  # noqa: E402
from kpolicy.executors.cpu import CpuAdapter, Recorder  # noqa: E402
from kpolicy.executors.cpu.arena import Arena  # noqa: E402

from .helpers import holds, record, same  # noqa: E402

HIDDEN, HEADS = 32, 4


class Layer(torch.nn.Module):
    """A transformer layer by hand: norm, attention with a causal mask, a gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.qkv = torch.nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up = torch.nn.Linear(HIDDEN, 128)
        self.down = torch.nn.Linear(64, HIDDEN)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        size = len(q)
        q, k, v = (each.view(size, HEADS, -1).transpose(0, 1) for each in (q, k, v))
        mask = torch.ones(size, size, dtype=torch.bool).tril()
        scores = (q @ k.transpose(1, 2) / 8**0.5).masked_fill(~mask, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(0, 1).reshape(size, HIDDEN)

    def before(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.qkv(self.norm(x)).chunk(3, -1)

    def after(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = x + self.out(attended)
        gate, up = self.up(x).chunk(2, -1)
        x += self.down(torch.nn.functional.silu(gate) * up)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(x, self.attend(*self.before(x)))


@pytest.mark.parametrize("size", [1, 7, 32])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_layer_replays_to_the_bit(size: int, mode: type) -> None:
    """A layer's replay on new inputs equals its eager run, however gradients were switched when it was recorded."""
    layer, x = Layer().eval(), torch.randn(size, HIDDEN)
    with mode():
        outputs, graph = record(lambda: layer(x))
    for _ in range(3):
        x.copy_(torch.randn(size, HIDDEN))
        graph.replay()
        with torch.inference_mode():
            assert same(outputs, layer(x))


@pytest.mark.parametrize("size", [1, 5, 24])
def test_a_llama_of_transformers_replays_to_the_bit(size: int) -> None:
    """A two-layer Llama as transformers has it replays to the bit on new tokens and positions."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    mask = torch.zeros(1, 1, size, size).masked_fill(torch.ones(size, size).triu(1).bool(), float("-inf"))
    ids, positions = torch.randint(128, (1, size)), torch.arange(size)[None].clone()

    def run() -> torch.Tensor:
        return model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).logits

    with torch.inference_mode():
        run()
        logits, graph = record(run)
        for step in range(3):
            ids.copy_(torch.randint(128, (1, size)))
            positions.copy_(torch.arange(size)[None] + step)
            graph.replay()
            assert same(logits, run())


def test_segments_around_an_eager_call_replay_to_the_bit() -> None:
    """Recordings that end before an eager call and begin after it share a pool and equal the eager run."""
    layers, adapter = [Layer().eval() for _ in range(3)], CpuAdapter(check=True)
    x = torch.randn(6, HIDDEN)
    pool = adapter.new_pool()
    program: list = []

    with torch.inference_mode():
        hidden = x
        adapter.begin(pool)
        for layer in layers:
            q, k, v = layer.before(hidden)
            program.append(adapter.end())
            fixed = torch.empty(6, HIDDEN)

            def eager(layer=layer, q=q, k=k, v=v, fixed=fixed) -> None:
                fixed.copy_(layer.attend(q, k, v))

            eager()
            program.append(eager)
            adapter.begin(pool)
            hidden = layer.after(hidden, fixed)
        program.append(adapter.end())
        for _ in range(3):
            x.copy_(torch.randn(6, HIDDEN))
            for each in program:
                each() if callable(each) else adapter.replay(each)
            expected = x
            for layer in layers:
                expected = layer(expected.clone())
            assert same(hidden, expected)


def test_two_threads_record_at_once() -> None:
    """Recordings on two threads at the same time see their own operators only."""
    layer, meet = Layer().eval(), threading.Barrier(2, timeout=30)
    failures: list[object] = []

    def one(size: int) -> None:
        x = torch.randn(size, HIDDEN)

        def run(wait: bool) -> torch.Tensor:
            if wait:
                meet.wait()
            y = layer(x)
            if wait:
                meet.wait()
            return y * 2

        with torch.inference_mode():
            try:
                outputs, graph = record(lambda: run(True))
                x.copy_(torch.randn(size, HIDDEN))
                graph.replay()
                assert same(outputs, run(False))
            except BaseException as error:  # noqa: BLE001
                failures.append(error)
                meet.abort()

    threads = [threading.Thread(target=one, args=(size,)) for size in (3, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_thread_records_one_thing_at_a_time() -> None:
    """A second recording, and a replay, are refused on a thread that records; the first goes on."""
    x = torch.randn(4)
    _, earlier = record(lambda: x * 2)
    recorder = Recorder()
    recorder.begin()
    try:
        with pytest.raises(CaptureError, match="recording already"):
            Recorder().begin()
        with pytest.raises(CaptureError, match="replayed while"):
            earlier.replay()
        y = x + 1
        graph = recorder.end()
    finally:
        recorder.abort()
    x.fill_(3)
    graph.replay()
    assert same(y, x + 1)


def test_an_error_in_the_model_leaves_no_mode() -> None:
    """After an error inside a recording nothing records any more, and the next recording works."""
    x = torch.arange(4.0)
    with pytest.raises(RuntimeError, match="shape"):
        record(lambda: x.view(3, 5))
    assert x.sum().item() == pytest.approx(sum(x.tolist()))
    holds(lambda t: t + 1, x)


def test_a_smaller_graph_lives_in_the_memory_of_a_larger_one() -> None:
    """Of graphs captured largest first into one pool, only the first takes memory, but for outputs that are held."""
    layer, arena = Layer().eval(), Arena()
    with torch.inference_mode():
        inputs = {size: torch.randn(size, HIDDEN) for size in (64, 32, 8, 1)}
        recorded = {size: record(lambda x=x: layer(x), Recorder(arena)) for size, x in inputs.items()}
        first = recorded[64][1].num_bytes
        assert all(graph.num_bytes < first / 4 for _, graph in list(recorded.values())[1:])
        for size in (1, 64, 8, 32):
            outputs, graph = recorded[size]
            inputs[size].copy_(torch.randn(size, HIDDEN))
            graph.replay()
            assert same(outputs, layer(inputs[size].clone()))


def test_num_bytes_leaves_out_what_was_there() -> None:
    """A graph counts its results and constants, not its inputs; results that die give their memory to later ones."""
    x = torch.randn(1024)
    _, one = record(lambda: x + 1)
    assert one.num_bytes == 4096
    _, chain = record(lambda: (x + 1).mul(2).add(3).mul(4).add(5))
    assert chain.num_bytes == 2 * 4096
    _, constant = record(lambda: x.add_(torch.tensor([1.0])))
    assert constant.num_bytes == 4


def test_release_frees_memory() -> None:
    """A graph keeps its inputs' memory; a released pool lets go of it, and only what the caller holds stays."""
    adapter = CpuAdapter()
    pool = adapter.new_pool()
    static, x = torch.randn(1 << 10), torch.randn(16)
    adapter.begin(pool)
    outputs = static[:16] + x
    graph = adapter.end()
    inputs, arena = StorageWeakRef(static.untyped_storage()), weakref.ref(pool.arena)
    results = StorageWeakRef(outputs.untyped_storage())
    held = outputs.clone()
    del static
    assert not inputs.expired()
    adapter.release(pool)
    assert inputs.expired()
    assert arena() is None
    assert graph.num_operators == 0
    assert same(outputs, held)
    del outputs
    assert results.expired()


def test_a_result_that_nobody_reads_is_not_copied() -> None:
    """Results beside the one that is used cost a replay nothing, and one that the caller holds stays right."""
    x = torch.randn(5, 8)

    def run(t: torch.Tensor) -> list[torch.Tensor]:
        normed, mean, _ = torch.native_layer_norm(t, (8,), None, None, 1e-5)
        return [normed, mean]

    holds(run, x)


def test_describe_names_operators_shapes_and_lines() -> None:
    """The listing shows each operator with shapes, what a replay does for it, and the model's line."""
    x = torch.randn(2, 3)
    _, graph = record(lambda: (x.t() + 1).neg_())
    text = graph.describe()
    assert [line.split()[1] for line in text.splitlines()[1:]] == ["view", "into", "in"]
    assert "aten.add.Tensor(float32[3, 2]) -> float32[3, 2]" in text
    assert text.count("test_recorder.py:") == 3
    assert text.startswith("3 operators in 2 calls, 64 bytes")


def test_check_finds_moved_and_abandoned_memory() -> None:
    """The debug check fails before launch when an input's memory moved or when nobody else holds it."""
    adapter = CpuAdapter(check=True)
    pool = adapter.new_pool()
    moved, dropped = torch.randn(8), torch.randn(8)
    graphs = []
    with torch.inference_mode():
        for x in (moved, dropped):
            adapter.begin(pool)
            _ = x + 1
            graphs.append(adapter.end())
        del x
        for graph in graphs:
            adapter.replay(graph)
        moved.resize_(1 << 16)
        with pytest.raises(GraphReplayError, match=r"test_recorder\.py:\d+ was recorded with has moved"):
            adapter.replay(graphs[0])
        del dropped
        with pytest.raises(GraphReplayError, match="held by nobody but the graph"):
            adapter.replay(graphs[1])
