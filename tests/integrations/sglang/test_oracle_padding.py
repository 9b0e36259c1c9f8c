"""Padding cleared without launches of its own: SGLang's own buffers and graph breaks, out of the wheels, on the CPU."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import pytest

from benchmarks.sglang import check
from benchmarks.sglang.check import looked_at, unlike, write_over
from benchmarks.sglang.host_cycles import wrapped
from kpolicy_sglang import padding
from kpolicy_sglang.captures import OneWarmUp
from kpolicy_sglang.failures import Failures
from kpolicy_sglang.versions import KNOWN
from tests.integrations.sglang.test_oracle import release_of
from tests.oracle.loader import executing
from tests.oracle.sglang_real import MARKS

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

pytestmark = MARKS
HOOKED = [each.name for each in KNOWN.values() if any(hook.around is padding.fill_from for hook in each.hooks)]
BUFFERS = "sglang.srt.model_executor.cuda_graph_buffer_registry"
ATTENTION = "sglang.srt.layers.radix_attention"
_BACKEND = "sglang.srt.model_executor.runner_backend_utils"
GRAPHS = f"{_BACKEND}.breakable_cuda_graph"
CONTEXT = f"{_BACKEND}.tc_piecewise_cuda_graph"


class Launches(TorchDispatchMode):
    """Counts what is written by name."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name.endswith("_"):
            self.found[name] += 1
        return function(*args, **kwargs or {})


class OnADevice:
    """A release whose buffers take the device's way on a CPU."""

    def __init__(self, version):
        self._release, self.name = release_of(version), version

    def read(self, member):
        text = self._release.read(member)
        if member.startswith(BUFFERS.replace(".", "/")):
            assert text.count('dst.device.type == "cpu"') == 1
            text = text.replace('dst.device.type == "cpu"', 'dst.device.type == "host"')
        return text


@contextmanager
def buffers_of(version, *, on_a_device=True):
    """The module of SGLang's buffers."""
    release = OnADevice(version) if on_a_device else release_of(version)
    with executing(release, (BUFFERS, "sglang.srt.model_executor.input_buffers"), ("sglang",)):
        module = import_module(BUFFERS)
        yield module


def runner_of(module, kind, **more):
    """A graph runner with SGLang's buffers of a kind."""
    common = {"device": torch.device("cpu"), "max_bs": 32, "cache_loc_dtype": torch.int64, "share_pool": False}
    if kind == "decode":
        registry = module.build_decode_registry(
            max_num_token=32, seq_len_fill_value=5, enable_mamba_track=True, **common
        )
    else:
        registry = module.build_prefill_registry(
            max_num_token=128, is_multimodal=True, hidden_size=4, embed_dtype=torch.float32, **common
        )
    registry.register_slot(
        module.GraphSlot("off", lambda *_: (32,), torch.int64, padding_policy=module.PaddingPolicy.ZERO, enabled=False)
    )
    return SimpleNamespace(buffer_registry=registry, **{"require_gathered_buffer": False, **more})


def batch_of(rng, rows, tokens, *, kinds):
    """What a registry copies of a batch; positions of several kinds where the model has them."""

    def made(*shape, dtype=torch.int64):
        return torch.randint(1, 100, shape, generator=rng).to(dtype)

    return SimpleNamespace(
        input_ids=made(tokens), positions=made(tokens), out_cache_loc=made(tokens), req_pool_indices=made(rows),
        seq_lens=made(rows), seq_lens_cpu=made(rows), mrope_positions=made(3, tokens) if kinds else None,
        mamba_track_indices=made(rows), mamba_track_mask=made(rows, dtype=torch.bool), input_embeds=None,
    )  # fmt: skip


def buffers(runner):
    return {name: slot.buffer for name, slot in runner.buffer_registry._slots.items() if slot.buffer is not None}


def tails_of(runner):
    return getattr(runner.buffer_registry, padding._ATTRIBUTE, None)


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("kinds", [False, True])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("version", HOOKED)
def test_buffers_hold_what_sglang_leaves_in_them(version, kind, kinds, past):
    """Whatever was in them, and whatever batches came before: bit for bit, padded by any size or not at all.

    The same by the buffers' own attribute, past the registry of hooks, which hands SGLang's arguments on by name.
    """
    draw, numbers = random.Random(3), torch.Generator().manual_seed(3)  # noqa: S311  not for secrets
    with buffers_of(version) as module:
        stock, ours = (runner_of(module, kind) for _ in range(2))
        fill = module.CudaGraphBufferRegistry.fill_from
        if past:
            question = {"fill_from": wrapped(fill, padding.fill_from)}
            ours.buffer_registry.__class__ = type("Hooked", (module.CudaGraphBufferRegistry,), question)
        padding.take_tails(ours, Failures())
        assert tails_of(ours) is not None
        own = vars(ours.buffer_registry).get("fill_from", partial(padding.fill_from, fill, ours.buffer_registry))
        assert isinstance(own, partial) != past
        for _ in range(300):
            rows = draw.randint(1, 32)
            tokens = rows if kind == "decode" else draw.randint(rows, 128)
            sizes = {"raw_bs": rows, "padded_bs": rows, "raw_num_tokens": tokens, "padded_num_tokens": tokens}
            if draw.random() < 0.8:
                sizes["padded_num_tokens"] = draw.randint(tokens, 32 if kind == "decode" else 128)
                if kind == "decode":
                    sizes["padded_bs"] = sizes["padded_num_tokens"]
            batch = batch_of(numbers, rows, tokens, kinds=kinds)
            for name, buffer in buffers(stock).items():
                garbage = torch.randint(0, 2 if buffer.dtype is torch.bool else 99, buffer.shape, generator=numbers)
                buffer.copy_(garbage)
                buffers(ours)[name].copy_(garbage)
            fill(stock.buffer_registry, batch, **sizes)
            own(batch, **sizes)
            for name, buffer in buffers(stock).items():
                # A model without multimodal positions has no graph that reads them.
                if kinds or name != "mrope_positions":
                    assert torch.equal(buffer, buffers(ours)[name]), (name, sizes)
            assert not hasattr(module._grouped_foreach_copy_, "func")


@pytest.mark.parametrize("version", HOOKED)
def test_padding_has_no_launch_of_its_own(version):
    """A padded decode is one copy a type as one without padding; by SGLang alone it clears buffer by buffer besides."""
    numbers = torch.Generator().manual_seed(1)
    padded = {"raw_bs": 12, "padded_bs": 16, "raw_num_tokens": 12, "padded_num_tokens": 16}
    exact = {"raw_bs": 12, "padded_bs": 12, "raw_num_tokens": 12, "padded_num_tokens": 12}
    with buffers_of(version) as module:
        stock, ours = (runner_of(module, "decode") for _ in range(2))
        padding.take_tails(ours, Failures())
        fill = module.CudaGraphBufferRegistry.fill_from
        batch = batch_of(numbers, 12, 12, kinds=False)
        found = []
        for how, runner, sizes in (
            (fill, stock, exact), (partial(padding.fill_from, fill), ours, exact), (fill, stock, padded),
            (partial(padding.fill_from, fill), ours, padded),
        ):  # fmt: skip
            with Launches() as launches:
                how(runner.buffer_registry, batch, **sizes)
            found.append(launches.found)
    alone, same, by_sglang, by_kpolicy = found
    assert alone == same == by_kpolicy == {"_foreach_copy_": 2}
    assert by_sglang == {"_foreach_copy_": 2, "zero_": 6, "fill_": 2}


@pytest.mark.parametrize("version", HOOKED)
def test_positions_of_several_kinds_have_sglangs_launches(version):
    """They are copied one by one, and so would be all that a copy takes along."""
    sizes = {"raw_bs": 12, "padded_bs": 16, "raw_num_tokens": 12, "padded_num_tokens": 16}
    with buffers_of(version) as module:
        ours = runner_of(module, "decode")
        padding.take_tails(ours, Failures())
        fill = module.CudaGraphBufferRegistry.fill_from
        batch = batch_of(torch.Generator().manual_seed(1), 12, 12, kinds=True)
        with Launches() as launches:
            padding.fill_from(fill, ours.buffer_registry, batch, **sizes)
    assert launches.found == {"_foreach_copy_": 2, "zero_": 6, "fill_": 2}


@pytest.mark.parametrize("version", HOOKED)
def test_buffers_of_the_host_are_cleared_too(version):
    """Where SGLang copies nothing to a device, and so has no launch that could take rows along."""
    sizes = {"raw_bs": 12, "padded_bs": 16, "raw_num_tokens": 12, "padded_num_tokens": 16}
    with buffers_of(version, on_a_device=False) as module:
        ours = runner_of(module, "decode")
        padding.take_tails(ours, Failures())
        write_over(ours.buffer_registry)
        batch = batch_of(torch.Generator().manual_seed(1), 12, 12, kinds=False)
        padding.fill_from(module.CudaGraphBufferRegistry.fill_from, ours.buffer_registry, batch, **sizes)
        assert unlike(ours.buffer_registry, (12, 16), (12, 16)) == 0


def test_a_slot_on_another_device_is_cleared_by_sglang():
    """Lengths on the host aren't in a copy on the device, and what is copied from is there before the first step."""
    with buffers_of("0.5.16") as module:
        ours, other = runner_of(module, "decode"), runner_of(module, "decode")
        other.buffer_registry.device = torch.device("meta")
        found = []
        for runner in (ours, other):
            padding.take_tails(runner, Failures())
            tails = tails_of(runner)
            constants = {id(constant) for each in tails._buffers.values() for _, constant in each}
            by_axis = [len(tails.of(*sizes)[0]) for sizes in ((12, 16, 12, 12), (12, 12, 12, 16))]
            found.append((len(constants), *by_axis, len(tails.cleared_by_sglang)))
    assert found == [(3, 5, 2, 0), (0, 0, 0, 7)]


def test_constants_are_of_their_buffers_device():
    """Buffers of one type on two devices aren't copied from one tensor."""
    with buffers_of("0.5.16") as module:
        ours = runner_of(module, "decode")
        slots = ours.buffer_registry._slots
        slots["positions"].buffer, made, own = Elsewhere(slots["positions"].buffer), [], torch.full

        def full(*args, device, **kwargs):
            made.append(device)
            return own(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "full", full)
            padding.take_tails(ours, Failures())
    assert made.count(Elsewhere.device) == 1
    assert len(made) == 4


class Elsewhere:
    """A buffer on a second device of the same type."""

    class device:  # noqa: N801
        type = "cpu"

    def __init__(self, buffer):
        self.dtype, self._buffer = buffer.dtype, buffer

    def dim(self):
        return self._buffer.dim()


def test_disabled_slots_are_left_alone():
    """One that has a buffer all the same isn't written to, and its step after the copy keeps nothing from kpolicy."""
    sizes = {"raw_bs": 2, "padded_bs": 4, "raw_num_tokens": 2, "padded_num_tokens": 4}
    with buffers_of("0.5.16") as module:
        ours = runner_of(module, "decode")
        slots = ours.buffer_registry._slots
        slots["off"].buffer, slots["off"].post_fill = torch.ones(32, dtype=torch.int64), print
        slots["off"].axis = "bs"
        padding.take_tails(ours, Failures())
        assert tails_of(ours) is not None
        batch = batch_of(torch.Generator().manual_seed(1), 2, 2, kinds=False)
        padding.fill_from(module.CudaGraphBufferRegistry.fill_from, ours.buffer_registry, batch, **sizes)
        assert slots["off"].buffer.tolist() == [1] * 32
        assert slots["out_cache_loc"].buffer.tolist()[2:4] == [0, 0]


def test_requests_alone_may_be_padded():
    """More rows than tokens are cleared too, by constants as long as the longer of both."""
    sizes = {"raw_bs": 2, "padded_bs": 32, "raw_num_tokens": 4, "padded_num_tokens": 4}
    with buffers_of("0.5.16") as module:
        registry = module.build_decode_registry(
            device=torch.device("cpu"), max_bs=32, max_num_token=4, seq_len_fill_value=5, share_pool=False,
            cache_loc_dtype=torch.int64,
        )  # fmt: skip
        ours = SimpleNamespace(buffer_registry=registry, require_gathered_buffer=False)
        padding.take_tails(ours, Failures())
        write_over(registry)
        batch = batch_of(torch.Generator().manual_seed(1), 2, 4, kinds=False)
        with Launches() as launches:
            padding.fill_from(module.CudaGraphBufferRegistry.fill_from, registry, batch, **sizes)
        assert unlike(registry, (2, 32), (4, 4)) == 0
        assert not launches.found["zero_"]


def test_views_are_kept():
    """Of a prompt's tokens however many rows it has, of decodes by both, up to a number of sizes."""
    with buffers_of("0.5.16") as module:
        ours = runner_of(module, "decode")
        padding.take_tails(ours, Failures())
        tails = tails_of(ours)
        assert tails.of(12, 16, 12, 16) is tails.of(12, 16, 12, 16)
        assert tails.of(3, 3, 12, 16) is tails.of(4, 4, 12, 16)
        assert tails.of(3, 3, 12, 16) is not tails.of(12, 16, 12, 16)
        assert [len(each) for each in tails.of(3, 4, 9, 9)[0]] == [1] * 5
        assert {len(each) for each in tails.of(3, 3, 9, 11)[0]} == {2}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(padding, "_KEPT", 2)
            assert tails.of(3, 4, 3, 4) is not tails.of(3, 4, 3, 4)


def test_a_fill_that_fails_leaves_nothing_for_the_next():
    """What it would have cleared isn't another batch's."""
    sizes = {"raw_bs": 2, "padded_bs": 4, "raw_num_tokens": 2, "padded_num_tokens": 4}

    def fails(*_, **__):
        raise RuntimeError("no memory")

    with buffers_of("0.5.16") as module:
        ours = runner_of(module, "decode")
        padding.take_tails(ours, Failures())
        with pytest.raises(RuntimeError, match="no memory"):
            padding.fill_from(fails, ours.buffer_registry, SimpleNamespace(), **sizes)
        assert not hasattr(module._grouped_foreach_copy_, "func")


@pytest.mark.parametrize("version", HOOKED)
def test_the_check_on_a_gpu_sees_rows_that_are_not_cleared(version):
    """benchmarks.sglang.check finds none after a fill of either, and what is written into one row of each buffer."""
    numbers = torch.Generator().manual_seed(1)
    with buffers_of(version) as module:
        for take in (False, True):
            runner = runner_of(module, "decode")
            if take:
                padding.take_tails(runner, Failures())
            write_over(runner.buffer_registry)
            sizes = {"raw_bs": 12, "padded_bs": 16, "raw_num_tokens": 12, "padded_num_tokens": 16}
            fill = module.CudaGraphBufferRegistry.fill_from
            padding.fill_from(fill, runner.buffer_registry, batch_of(numbers, 12, 12, kinds=False), **sizes)
            assert unlike(runner.buffer_registry, (12, 16), (12, 16)) == 0
            for buffer in buffers(runner).values():
                buffer[..., 13:14] = 1
            assert unlike(runner.buffer_registry, (12, 16), (12, 16)) == 7


@pytest.mark.parametrize("version", HOOKED)
def test_what_goes_by_the_padded_size_is_left_to_sglang(version):
    """Ranks that gather their tokens have the padded size written into a buffer."""
    with buffers_of(version) as module:
        gathered = runner_of(module, "decode", require_gathered_buffer=True)
        padding.take_tails(gathered, Failures())
        assert tails_of(gathered) is None
        del gathered.require_gathered_buffer
        padding.take_tails(gathered, Failures())
        assert tails_of(gathered) is None
        counted = SimpleNamespace(
            require_gathered_buffer=False,
            buffer_registry=module.build_decode_registry(
                device=torch.device("cpu"), max_bs=4, max_num_token=4, seq_len_fill_value=1, share_pool=False,
                cache_loc_dtype=torch.int64, enable_num_token_non_padded=True,
            ),
        )  # fmt: skip
        padding.take_tails(counted, Failures())
        assert tails_of(counted) is None


def test_a_buffer_that_is_not_as_known_is_cleared_by_sglang():
    """Where looking at the slots raises, the fill is SGLang's, and so are all after it; it is counted."""
    numbers, failures = torch.Generator().manual_seed(1), Failures()
    sizes = {"raw_bs": 2, "padded_bs": 4, "raw_num_tokens": 2, "padded_num_tokens": 4}
    with buffers_of("0.5.16") as module:
        ours = runner_of(module, "decode")
        padding.take_tails(ours, failures)
        ours.buffer_registry._slots["positions"].buffer.fill_(7)
        kept = tails_of(ours)
        kept._buffers = None
        fill = module.CudaGraphBufferRegistry.fill_from
        padding.fill_from(fill, ours.buffer_registry, batch_of(numbers, 2, 2, kinds=False), **sizes)
        assert buffers(ours)["positions"].tolist()[2:5] == [0, 0, 7]
        assert failures.total == 1
        padding.fill_from(fill, ours.buffer_registry, batch_of(numbers, 2, 2, kinds=False), **sizes)
        assert failures.total == 1
        assert tails_of(ours) is kept  # what a copy on another stream may still read


# Attention between two segments of a graph


class Recorded(TorchDispatchMode):
    """A pretended `CUDAGraph`: what runs between begin and end is run again at each replay, over the same memory.

    Memory that a step asks for has garbage in it at a replay, as what other layers left there.
    """

    def __init__(self):
        super().__init__()
        self.ran = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **kwargs or {})
        self.ran.append((function, args, kwargs or {}, found))
        return found

    def capture_begin(self, **_):
        self.__enter__()

    def capture_end(self):
        self.__exit__(None, None, None)

    def replay(self):
        for function, args, kwargs, found in self.ran:
            name = function.overloadpacket.__name__
            if "empty" in name:
                found.fill_(float("nan"))
            elif name.endswith("_"):
                function(*args, **kwargs)
            elif not function.is_view:
                found.copy_(function(*args, **kwargs))


class Backend:
    """Attention over a batch's rows: into the output that it is given, or of its own."""

    into_output = False

    def forward(self, query, key, value, layer, batch, _save_kv_cache, **_):
        key, value = (each.reshape(query.shape) for each in (key, value))
        out = query * key.cumsum(0) + value + layer.layer_id
        if not self.into_output:
            return out
        batch._attn_output.copy_(out)
        return batch._attn_output


SIZES, WIDTH, LAYERS = (8, 16, 48), 4, 3


class Prompts:
    """SGLang's attention layers in graphs of some sizes; each row sees all rows, padding too, in the layer after."""

    def __init__(self, attention, graphs, context):
        self.attention, self.graphs, self.context = attention, graphs, context
        self.layers = [attention.RadixAttention(1, WIDTH, 1.0, 1, layer_id=i) for i in range(LAYERS)]
        self.batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_extend=lambda: True), num_token_non_padded_cpu=0,
            out_cache_loc=torch.zeros(64),
        )  # fmt: skip
        self.input = torch.zeros(64, WIDTH)
        self.made = {}

    def __call__(self, size):
        hidden = self.input[:size] + 0
        for layer in self.layers:
            out = layer(hidden * 2, hidden + 1, hidden.sin(), self.batch)
            hidden = hidden + out + out.mean(0)
        return hidden

    @contextmanager
    def going(self, **tokens):
        with (
            self.graphs.enable_breakable_cuda_graph(),
            self.context.set_tc_piecewise_forward_context(self.batch, self.layers, None, None, None, **tokens),
        ):
            yield

    def capture_one(self, shape):
        """As the backend's: warm up, then capture."""
        self.batch.num_token_non_padded_cpu = shape.size
        with self.going():
            self(shape.size)
            graph = self.graphs.BreakableCUDAGraph()
            with self.graphs.BreakableCUDAGraphCapture(graph, pool=(0, 0)):
                self.made[shape.size] = graph, self(shape.size)

    def replay(self, tokens, size, numbers):
        """The hidden rows of a batch in a graph, and what was written between its segments."""
        self.batch.num_token_non_padded_cpu = tokens
        self.input[:tokens] = torch.randn(tokens, WIDTH, generator=numbers)
        self.input[tokens:] = 0
        graph, hidden = self.made[size]
        between = Launches()
        own = list(graph._break_fns)
        graph._break_fns[:] = [partial(counted, between, each) for each in own]
        with self.going(num_tokens=size, raw_num_tokens=tokens):
            graph.replay()
            assert self.context.get_tc_piecewise_forward_context().raw_num_tokens == tokens
        graph._break_fns[:] = own
        return hidden.clone(), between.found


def counted(launches, function):
    with launches:
        return function()


@pytest.fixture
def prompts(monkeypatch):
    """Prompts in 0.5.16's graphs; each call makes them anew, by SGLang or with kpolicy's hook."""
    real = (
        ATTENTION,
        GRAPHS,
        f"{GRAPHS}.breakable_cuda_graph",
        f"{GRAPHS}.context",
        CONTEXT,
        f"{CONTEXT}.context_manager",
    )
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: None)
    with executing(release_of("0.5.16"), real, ("sglang",)):
        attention, graphs, context = (import_module(name) for name in (ATTENTION, GRAPHS, CONTEXT))
        import_module("sglang.srt.compilation.weak_ref_tensor").weak_ref_tensors = lambda tensor: tensor
        backend = Backend()
        monkeypatch.setattr(attention, "get_attn_backend", lambda: backend)
        own, cleared = attention.breakable_unified_attention_with_output, padding._cleared_attention

        def make(*, hooked, sizes=SIZES, into_output=False):
            backend.into_output = into_output
            attention.breakable_unified_attention_with_output = (
                partial(padding.attention_0_5_16, own) if hooked else own
            )
            made = Prompts(attention, graphs, context)
            capture = padding.clear_in_graphs(made.capture_one, sizes, make.failures) if hooked else made.capture_one
            for size in reversed(sizes):
                capture(SimpleNamespace(size=size))
            return made

        make.failures = Failures()
        yield make
        cleared.cache_clear()  # it is of this SGLang


@pytest.mark.parametrize("into_output", [False, True])
def test_padded_prompts_have_sglangs_rows_to_the_bit(prompts, into_output):
    """In each graph, after any other batch, whether attention writes into its output or beside it."""
    stock, ours = (prompts(hooked=each, into_output=into_output) for each in (False, True))
    rng = random.Random(5)  # noqa: S311  not for secrets
    numbers = [torch.Generator().manual_seed(9) for _ in range(2)]
    for _ in range(120):
        size = rng.choice(SIZES)
        tokens = rng.randint(padding.first_empty(SIZES, size), size)
        (rows, cleared), (same, none) = (
            each.replay(tokens, size, numbers[i]) for i, each in enumerate((stock, ours))
        )  # fmt: skip
        assert rows.isfinite().all()
        assert torch.equal(rows, same), (tokens, size)
        assert cleared["zero_"] == (LAYERS if tokens < size else 0)
        assert none["zero_"] == 0
    assert not prompts.failures.total


def test_a_batch_that_a_smaller_graph_has_room_for_is_cleared_by_sglang(prompts):
    """The graph leaves rows out that no batch of its size leaves empty; where one does, SGLang clears its own way."""
    stock, ours = (prompts(hooked=each) for each in (False, True))
    numbers = [torch.Generator().manual_seed(9) for _ in range(2)]
    for tokens, size in ((3, 16), (16, 48), (8, 16), (17, 48)):
        (rows, _), (same, found) = (each.replay(tokens, size, numbers[i]) for i, each in enumerate((stock, ours)))
        assert torch.equal(rows, same)
        assert found["zero_"] == (0 if tokens == 17 else LAYERS)


def test_rows_that_nobody_clears_would_be_seen(prompts, monkeypatch):
    """Were a graph taken to clear what it doesn't, all rows would be no numbers, which the tests above would see."""
    monkeypatch.setattr(padding, "first_empty", lambda sizes, size: size)  # noqa: ARG005
    cleared = padding._cleared_attention()
    monkeypatch.setattr(padding, "_cleared_attention", lambda: partial(taken_from_0, cleared))
    rows, _ = prompts(hooked=True).replay(20, 48, torch.Generator())
    assert rows.isnan().all()


def taken_from_0(attention, *args, cleared_from, **kwargs):
    return attention(*args, cleared_from=0, **kwargs)


@pytest.mark.parametrize("hooked", [False, True])
def test_the_check_on_a_gpu_looks_behind_each_layer(prompts, hooked):
    """benchmarks.sglang.check tells whether the graph cleared an output, and what isn't cleared."""
    made, numbers = prompts(hooked=hooked), torch.Generator().manual_seed(1)
    graph, _ = made.made[48]
    with looked_at(graph, 20) as found:
        made.replay(20, 48, numbers)
    assert found == [(0, hooked)] * LAYERS
    with looked_at(graph, 3) as found:
        made.replay(20, 48, numbers)
    assert [left > 0 for left, _ in found] == [True] * LAYERS


def test_the_check_on_a_gpu_finds_the_output_of_0_5_23(monkeypatch):
    """It isn't where 0.5.16 has it: its attention is a method, and may have no value."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: None)
    monkeypatch.setattr(torch.xpu, "XPUGraph", Recorded)
    real = (GRAPHS, f"{GRAPHS}.breakable_cuda_graph", f"{GRAPHS}.context")
    with executing(release_of("0.5.23"), real, ("sglang",)):
        graphs = import_module(GRAPHS)
        import_module("sglang.srt.compilation.weak_ref_tensor").weak_ref_tensors = lambda tensor: tensor
        clears = [True]

        def attention(_self, q, k, v, output, save_kv_cache=True, **_):
            output[:5].copy_(q[:5])
            output[5:].fill_(not clears[0])

        def other(_self, q):
            return q

        layer, query = object(), torch.ones(8, WIDTH)
        broken, beside = (graphs.eager_on_graph(each)._graph_call if hasattr(graphs.eager_on_graph(each), "_graph_call")
                          else graphs.eager_on_graph(each) for each in (attention, other))  # fmt: skip
        graph = graphs.BreakableCUDAGraph()
        with graphs.BreakableCUDAGraphCapture(graph, pool=(0, 0)):
            beside(layer, query)
            broken(layer, query, query, None, torch.empty_like(query), save_kv_cache=True)
        left = []
        for clears[0] in (True, False):
            with looked_at(graph, 5) as found:
                graph.replay()
            left += found
    assert left == [(0, False), (3 * WIDTH, False)]


def test_outputs_of_a_torch_operator_are_found_by_its_schema():
    """SGLang's attention of 0.5.16 is one, whose parameters Python doesn't have."""
    given = check._by_name(torch.ops.aten.copy_, (1, 2), {"non_blocking": True})
    assert given == {"self": 1, "src": 2, "non_blocking": True}


@pytest.mark.parametrize(("found", "passes"), [
    ({}, True), ({"left": 1}, False), ({"outputs": 0, "of_graphs": 0}, False), ({"outputs": 29}, False),
    ({"of_graphs": 0}, False), ({"of_graphs": 0, "hooked": False}, True), ({"hooked": False}, False),
])  # fmt: skip
def test_the_check_on_a_gpu_passes_where_it_looked_at_all(found, passes):
    """Every output, and graphs that clear them where they are made to."""
    padding_found = {"left": 0, "outputs": 30, "wanted": 30, "of_graphs": 30, "hooked": True}
    assert check.cleared({**padding_found, **found}) is passes


def test_a_capture_that_fails_so_is_done_as_sglang_does_it(prompts, monkeypatch):
    """It is counted, and the graphs after it are SGLang's too: they have its rows, and its launches."""
    monkeypatch.setattr(padding, "_cleared_attention", lambda: 1 / 0)
    stock, ours = (prompts(hooked=each) for each in (False, True))
    numbers = [torch.Generator().manual_seed(9) for _ in range(2)]
    (rows, _), (same, found) = (each.replay(20, 48, numbers[i]) for i, each in enumerate((stock, ours)))
    assert torch.equal(rows, same)
    assert found["zero_"] == LAYERS
    assert prompts.failures.total == 1


def test_a_capture_without_memory_is_sglangs_to_handle(prompts, monkeypatch):
    """It would fail again the other way. SGLang's own end of the capture then fails for another reason."""
    calls = []

    def full(*_, **__):
        calls.append(True)
        if len(calls) > LAYERS:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.zeros(48, WIDTH)

    monkeypatch.setattr(Backend, "forward", full)
    with pytest.raises(AssertionError):
        prompts(hooked=True)
    assert len(calls) == LAYERS + 1
    assert not prompts.failures.total
    assert not padding._clearing


def test_a_capture_that_fails_either_way_is_not_noted_as_ours(prompts, monkeypatch):
    """What it failed of first is SGLang's to handle."""

    def full(*_, **__):
        raise RuntimeError(f"no kernel, {'cleared' if padding._clearing else 'as SGLang does it'}")

    monkeypatch.setattr(Backend, "forward", full)
    with pytest.raises(RuntimeError, match="no kernel, cleared"):
        prompts(hooked=True)
    assert not prompts.failures.total


def test_each_way_of_a_capture_is_given_up_alone():
    """A clearing capture that fails leaves the one warm-up, and one whose warm-up fails leaves the clearing."""
    for bad, noted in (("cleared", "a capture that clears attention's output"), ("once", "a capture with one warm-up")):
        failures, ways = Failures(), []

        def capture(shape, step, bad=bad, ways=ways):
            first = step()
            how = (*(["cleared"] if padding._clearing else []), *(["once"] if step() is first else []))
            ways.append((shape.size, how))
            if shape.size == 4 and bad in how:
                raise RuntimeError(bad)
            step()

        one = OneWarmUp(capture, SimpleNamespace(), failures)
        capture_one = padding.clear_in_graphs(one, (2, 4, 8), failures)
        for size in (8, 4, 2):
            capture_one(SimpleNamespace(size=size, variant_label=None, stream_idx=None), object)
        assert failures.counts == {noted: 1}
        kept = {"cleared": ("once",), "once": ("cleared",)}[bad]
        assert ways[0] == (8, ("cleared",))
        assert ways[-2:] == [(4, kept), (2, kept)]


@pytest.mark.parametrize(("size", "first"), [(8, 1), (16, 9), (48, 17), (64, 49)])
def test_the_first_row_that_may_be_empty(size, first):
    """A batch of as many rows as the next smaller graph has goes to that one."""
    assert padding.first_empty(SIZES, size) == first
