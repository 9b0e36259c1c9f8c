"""Inputs that can't be: an error that names them, in every mode, and at the cost of no graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.engine import Engine  # noqa: E402
from kpolicy.errors import ConfigError, UnknownNameError  # noqa: E402
from kpolicy.executors.cpu import CpuExecutor  # noqa: E402
from kpolicy.settings import Settings  # noqa: E402
from kpolicy.testing.sequences import Sequences  # noqa: E402

MODES = ("full", "piecewise", "eager")


@pytest.fixture(params=MODES)
def stepped(request: pytest.FixtureRequest, small: Callable[..., Any]) -> tuple[Engine, Any]:
    """An Engine that runs all in one mode, and the inputs of two prompts."""
    return _stepped(Engine(request.param, model=small(), ladder=[2, 4, 8, 16], calibrate=0), request.param)


@pytest.fixture(params=MODES)
def simulated(request: pytest.FixtureRequest) -> tuple[Engine, Any]:
    """The same on the simulated device."""
    executor = "simulated"
    engine = Engine(request.param, attention="gqa", executor=executor, ladder=[2, 4, 8, 16], calibrate=0)
    return _stepped(engine, request.param)


def _stepped(engine: Engine, mode: str) -> tuple[Engine, Any]:
    engine.capture()
    sequences = Sequences(1)
    inputs = sequences.inputs([sequences.chunk(sequences.start(), 3), sequences.chunk(sequences.start(), 5)])
    assert engine.step(inputs).decision.mode.value == mode
    return engine, inputs


WRONG = pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"positions": [0, 1]}, "token_ids 8, positions 2, slot_mapping 8"),
        ({"kv_lens": [3]}, "query_lens 2, kv_lens 1, block_table 2"),
        ({"query_lens": [3, 4]}, "query_lens come to 7 tokens"),
        ({"query_lens": [3, 9]}, "query_lens come to 12 tokens"),
        ({"query_lens": [-3, 11]}, "query_lens has -3"),
        ({"query_lens": [0, 8]}, "query_lens has 0"),
        ({"wanted": [2, 8]}, "wanted goes from 2 to 8 in a launch of 8 tokens"),
        ({"wanted": [-1, 7]}, "wanted goes from -1 to 7"),
        ({"wanted": [7, 2]}, "wanted goes from 7 to 2"),
        ({"wanted": ["a", "b"]}, "aren't sequences of whole numbers"),
        ({"query_lens": ["a", "b"]}, "aren't sequences of whole numbers"),
        ({"query_lens": torch.tensor([0, 8])}, "query_lens has 0; a row"),
        ({"query_lens": np.array([[3, 0], [5, 0]])}, "aren't sequences of whole numbers"),
        ({"sampling": {"temperature": [0.5]}}, "sampling input temperature has 1 values for 2 wanted rows"),
        ({"sampling": {"temperature": [0.5, 0.5], "seed": [1]}}, "sampling input seed has 1 values for 2 wanted rows"),
        ({"sampling": {"top_p": [0.9, 0.9]}}, "unknown sampling input 'top_p'"),
        ({"extra": {"scale": [1.0] * 8}}, "brings the extra inputs .'scale'. and the model takes"),
    ],
)


@WRONG
def test_inputs_that_do_not_fit_each_other_are_named(
    stepped: tuple[Engine, Any], wrong: dict[str, Any], words: str
) -> None:
    """What is missing isn't padding: with it the step would compute something else, or sample greedily."""
    engine, inputs = stepped
    before = engine.registry.captured()
    with pytest.raises(ConfigError, match=words):
        engine.step(inputs._replace(**wrong))
    assert engine.registry.captured() == before
    engine.step(inputs)


@WRONG
def test_the_simulated_device_names_them_too(simulated: tuple[Engine, Any], wrong: dict[str, Any], words: str) -> None:
    """A test on it would pass for inputs that no device takes."""
    test_inputs_that_do_not_fit_each_other_are_named(simulated, wrong, words)


FIELDS = ("query_lens", "token_ids", "positions", "slot_mapping", "block_table", "kv_lens", "wanted")


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_inputs_may_be_arrays(stepped: tuple[Engine, Any], array: Callable[[Any], Any]) -> None:
    """They compute what lists do, and cost no graph."""
    engine, inputs = stepped
    before, wanted = engine.registry.captured(), engine.step(inputs)
    for field in FIELDS:
        found = engine.step(inputs._replace(**{field: array(getattr(inputs, field))}))
        assert torch.equal(torch.stack(list(found.outputs)), torch.stack(list(wanted.outputs))), field
        assert found.decision == wanted.decision, field
    assert engine.registry.captured() == before


def test_the_simulated_device_takes_arrays(simulated: tuple[Engine, Any]) -> None:
    """NumPy's, as devices do."""
    engine, inputs = simulated
    wanted = engine.step(inputs)
    for field in FIELDS:
        found = engine.step(inputs._replace(**{field: np.array(getattr(inputs, field))}))
        assert [int(each) for each in found.outputs] == [int(each) for each in wanted.outputs], field
        assert found.decision == wanted.decision, field


def test_a_sampling_input_that_nobody_reads_is_refused(stepped: tuple[Engine, Any]) -> None:
    """It isn't dropped: tokens would come from another distribution than was asked for."""
    engine, inputs = stepped
    with pytest.raises(UnknownNameError, match="unknown sampling input 'top_p'"):
        engine.step(inputs._replace(sampling={"temperature": [0.5, 0.5], "top_p": [0.9, 0.9]}))


@pytest.mark.parametrize("wrong", [{"token_ids": [1000] * 8}, {"slot_mapping": [10**6] * 8}])
def test_a_token_that_is_not_there_costs_no_graph(stepped: tuple[Engine, Any], wrong: dict[str, Any]) -> None:
    """Every mode raises it, so the graph isn't to blame: requests of this kind would take all graphs in the end."""
    engine, inputs = stepped
    before = engine.registry.captured()
    for _ in range(3):
        with pytest.raises(IndexError):
            engine.step(inputs._replace(**wrong))
    assert engine.registry.captured() == before
    assert engine.stats.replay_failures == 0
    engine.step(inputs)


@pytest.mark.parametrize("row", [0, 1])
def test_a_token_that_is_not_there_costs_no_half_its_graph(row: int, small: Callable[..., Any]) -> None:
    """Neither the half that is launched first nor the one beside it."""
    engine = Engine("split", model=small(), ladder=[2, 4, 8, 16], calibrate=0)
    engine.capture()
    sequences = Sequences(1)
    started = sequences.start()
    rows = [sequences.chunk(started, 3)]
    engine.step(sequences.inputs(rows))
    sequences.advance(rows)
    inputs = sequences.inputs([sequences.decode(started), sequences.chunk(sequences.start(), 4)])
    before, failures = engine.registry.captured(), engine.stats.replay_failures
    assert len(engine.compiled.select(*inputs.numbers).keys) == 2
    tokens = list(inputs.token_ids)
    tokens[row] = 1000
    for _ in range(2):
        with pytest.raises(IndexError):
            list(engine.step(inputs._replace(token_ids=tokens)).outputs)
    assert engine.stats.replay_failures == failures
    assert engine.registry.captured() == before
    engine.step(inputs)


@pytest.mark.parametrize("policy", ["full", "piecewise", "split"])
def test_a_token_that_only_the_graph_lacks_costs_the_graph(policy: str, small: Callable[..., Any]) -> None:
    """A graph keeps the weights it was captured with. A vocabulary that grew since then costs it, never the step."""
    model = small()
    engine = Engine(policy, model=model, ladder=[2, 4, 8, 16], calibrate=0)
    engine.capture()
    (embedding,) = {
        each
        for part in vars(model).values()
        if isinstance(part, torch.nn.Module)
        for each in part.modules()
        if isinstance(each, torch.nn.Embedding)
    }
    vocab = embedding.weight.shape[0]
    longer = torch.cat([embedding.weight, embedding.weight]).clone()
    embedding.weight = torch.nn.Parameter(longer, requires_grad=False)
    sequences = Sequences(1)
    started = sequences.start()
    engine.step(sequences.inputs([sequences.chunk(started, 3)]))
    sequences.advance([sequences.chunk(started, 3)])
    rows = [sequences.decode(started), sequences.chunk(sequences.start(), 4)]
    inputs = sequences.inputs(rows)
    inputs = inputs._replace(token_ids=[token + vocab for token in inputs.token_ids])
    before, failures = engine.registry.captured(), engine.stats.replay_failures
    replayed = engine.compiled.select(*inputs.numbers).keys
    assert replayed

    outputs = engine.step(inputs)
    wanted = Engine("eager", model=model, calibrate=0).step(inputs).outputs
    assert torch.allclose(torch.stack(list(outputs.outputs)), torch.stack(list(wanted)), atol=1e-5)
    assert not outputs.decision.keys
    assert set(before) - set(engine.registry.captured()) == set(replayed)
    assert engine.stats.replay_failures > failures


def test_extra_inputs_are_of_every_token(small: Callable[..., Any]) -> None:
    """One that is short would be zeros for the tokens beyond."""
    model = small()
    model.extra_inputs = {"scale": ((), "float32")}
    engine = Engine("eager", model=model, calibrate=0)
    sequences = Sequences(1)
    inputs = sequences.inputs([sequences.chunk(sequences.start(), 4)])
    with pytest.raises(ConfigError, match="extra input scale has 3 values for 4 tokens"):
        engine.step(inputs._replace(extra={"scale": [1.0] * 3}))


def _decoding(engine: Engine, query_len: int) -> Any:
    """Inputs of two decode rows that have their KV."""
    engine.capture()
    sequences = Sequences(1)
    rows = [sequences.chunk(sequences.start(), size) for size in (3, 5)]
    engine.step(sequences.inputs(rows))
    sequences.advance(rows)
    return sequences.inputs([sequences.decode(row.sequence, query_len) for row in rows])


@pytest.mark.parametrize("executor", ["cpu", "simulated"])
@pytest.mark.parametrize("policy", MODES)
@pytest.mark.parametrize("query_len", [1, 2])
def test_decode_rows_are_wanted(executor: str, policy: str, query_len: int, small: Callable[..., Any]) -> None:
    """Their next token is sampled from their last one; without it the reader met an IndexError, or had too few."""
    settings = Settings(max_num_reqs=4, max_num_tokens=32, num_speculative_tokens=query_len - 1)
    made: Any = CpuExecutor(small()) if executor == "cpu" else executor
    engine = Engine(policy, attention="gqa", executor=made, ladder=[2, 4, 8], calibrate=0, settings=settings)
    inputs = _decoding(engine, query_len)
    for wanted in ([], [2 * query_len - 1], [0] * (query_len > 1) + [query_len - 1]):
        with pytest.raises(ConfigError, match="the last token of each of 2 decode rows"):
            engine.step(inputs._replace(wanted=wanted))
    assert engine.stats.replay_failures == 0
    engine.step(inputs)


@pytest.mark.parametrize(("executor", "array"), [("cpu", np.array), ("cpu", torch.tensor), ("simulated", np.array)])
@pytest.mark.parametrize("policy", MODES)
def test_rows_with_drafts_may_be_arrays(
    policy: str, executor: str, array: Callable[[Any], Any], small: Callable[..., Any]
) -> None:
    """Which outputs are decode rows' last ones goes by the values; a tensor's entries are equal to nothing else's."""
    settings = Settings(max_num_reqs=4, max_num_tokens=32, num_speculative_tokens=1)
    made: Any = CpuExecutor(small()) if executor == "cpu" else executor
    engine = Engine(policy, attention="gqa", executor=made, ladder=[2, 4, 8], calibrate=0, settings=settings)
    inputs = _decoding(engine, 2)
    before, wanted = engine.registry.captured(), [int(each) for each in engine.step(inputs).tokens[0]]
    for fields in (("query_lens",), ("wanted",), ("query_lens", "wanted")):
        outputs = engine.step(inputs._replace(**{field: array(getattr(inputs, field)) for field in fields}))
        assert [int(each) for each in outputs.tokens[0]] == wanted, fields
    with pytest.raises(ConfigError, match=r"the outputs of tokens \[0, 2\] are wanted"):
        engine.step(inputs._replace(wanted=array([0, 2])))
    assert engine.registry.captured() == before


def test_decode_rows_are_as_long_as_the_numbers_say(small: Callable[..., Any]) -> None:
    """A graph of decode rows divides its tokens by its own length, whatever query_lens says."""
    engine = Engine("full", model=small(), ladder=[2, 4, 8], calibrate=0)
    inputs = _decoding(engine, 1)
    with pytest.raises(ConfigError, match="each decode row has 1 tokens"):
        engine.step(inputs._replace(query_lens=[2, 0]))
    engine.step(inputs)


@pytest.mark.parametrize("policy", MODES)
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"token_ids": [5, 1000]}, "token_ids has 1000, which isn't from 0 to 99"),
        ({"token_ids": torch.tensor([5, -1])}, "token_ids has -1"),
        ({"positions": [3, 10**6]}, "positions has 1000000"),
        ({"slot_mapping": [-5, 3]}, "slot_mapping has -5"),
        ({"slot_mapping": [7, 7]}, "slot 7 is written twice"),
        ({"kv_lens": [0, 6]}, "row 0 runs 1 tokens and attends to 0"),
        ({"kv_lens": [4, 600]}, "row 1 attends to 600 tokens in 1 blocks"),
        ({"block_table": [[0], [-1]]}, "block_table of row 1 has -1"),
        ({"query_lens": [0, 2]}, "query_lens has 0"),
        ({"wanted": [0, 0]}, "wanted is .0, 0., which doesn't rise"),
        ({"token_ids": ["a", 0]}, "token_ids has 'a', which isn't a whole number"),
        ({"positions": [None, 0]}, "positions has None"),
        ({"kv_lens": [4, 6.5]}, "kv_lens has 6.5"),
        ({"block_table": [[0], ["b"]]}, "block_table of row 1 has 'b'"),
    ],
)
def test_the_debug_mode_looks_at_every_value(
    policy: str, wrong: dict[str, Any], words: str, small: Callable[..., Any]
) -> None:
    """What isn't there, or is another row's, is named before the launch, and costs no graph."""
    engine = Engine(policy, executor=CpuExecutor(small(), check=True), attention="gqa", ladder=[2, 4, 8], calibrate=0)
    inputs = _decoding(engine, 1)
    before = engine.registry.captured()
    with pytest.raises(ConfigError, match=words):
        engine.step(inputs._replace(**wrong))
    assert engine.registry.captured() == before
    engine.step(inputs)


@pytest.mark.parametrize("policy", ["full", "eager"])
def test_the_debug_mode_leaves_the_padding_of_block_tables(policy: str, small: Callable[..., Any]) -> None:
    """Nobody reads what is behind a row's last block, so a step that runs without the mode runs with it."""
    found = {}
    for check in (False, True):
        executor = CpuExecutor(small(), check=check)
        engine = Engine(policy, executor=executor, attention="gqa", ladder=[2, 4, 8], calibrate=0)
        inputs = _decoding(engine, 1)
        for filler in (0, -1, 10**6):
            padded = [[*row, filler] for row in inputs.block_table]
            tables = (padded, torch.tensor(padded)) if check else (padded,)
            for table in tables:
                outputs = engine.step(inputs._replace(block_table=table))
                found[check, filler] = torch.stack(list(outputs.outputs))
        with pytest.raises(ConfigError if check else IndexError, match=r"block_table of row 0 has 1000000|index"):
            engine.step(inputs._replace(block_table=[[10**6, *row] for row in inputs.block_table]))
    assert all(torch.equal(each, found[False, 0]) for each in found.values())
