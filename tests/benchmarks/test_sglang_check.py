"""benchmarks/sglang/check.py over a stand-in for SGLang that computes what `transformers` does."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks.sglang import check as module  # noqa: E402 - torch may be absent

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


class Batch:
    """Requests whose tokens lie in a pool, as SGLang's `ScheduleBatch` has them."""

    def __init__(self, pool, reqs, new):
        self.pool, self.reqs, self.new, self.extra = pool, reqs, new, None
        self.req_pool_indices = torch.arange(len(pool) - len(reqs), len(pool))
        self.input_ids = None

    def merge_batch(self, other):
        self.reqs = self.reqs + other.reqs
        self.req_pool_indices = torch.cat([self.req_pool_indices, other.req_pool_indices])

    def prepare_for_decode(self):
        self.new = None

    def mix_with_running(self, running):
        self.extra = running


class Pretended:
    """What `Steps` is to the check, without SGLang: the reference's logits over all that a row has seen."""

    def __init__(self, reference, *, wrong=0.0, never=""):
        self.reference, self.wrong, self.never = reference, wrong, never
        self.pool, self.served, self.force, self.decoded = [], "", None, []
        self.runner = SimpleNamespace(
            prefill_cuda_graph_runner=SimpleNamespace(capture_num_tokens=[64, 2048]),
            decode_cuda_graph_runner=SimpleNamespace(capture_bs=[16]),
        )

    def clear(self):
        self.pool = []

    def request(self, ids):
        return list(ids)

    def grow(self, batch):
        pass

    def extend_batch(self, requests):
        self.pool += [[] for _ in requests]
        return Batch(self.pool, requests, [list(each) for each in requests])

    def load(self, batch, tail=None):
        batch.tail = tail
        return batch

    def _rows(self, batch):
        """The rows of a batch after this step's tokens."""
        if batch.new is not None:
            for place, new in zip(batch.req_pool_indices.tolist(), batch.new, strict=True):
                self.pool[place] += new
        else:
            for place, new in zip(batch.req_pool_indices.tolist(), batch.input_ids.tolist(), strict=True):
                self.pool[place].append(new)
        return [self.pool[place] for place in batch.req_pool_indices.tolist()]

    def logits(self, batch):
        rows = self._rows(batch)
        if batch.extra is not None:
            batch.extra.input_ids = batch.tail
            rows = rows + self._rows(batch.extra)
        graph = "D" if batch.new is None else "P"
        replayed = self.force is not False and graph != self.never
        self.served += graph if replayed else "-"
        self.decoded += [len(rows)] if batch.new is None else []
        found = torch.stack([self.reference(torch.tensor([row])).logits[0, -1] for row in rows])
        return SimpleNamespace(next_token_logits=found * (1 + self.wrong * replayed)), None


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """Runs the check, over a stand-in made with these arguments."""
    monkeypatch.setattr(module, "CONFIGS", {"qwen": {**module.CONFIGS["qwen"], **SMALL}})
    for name, value in {"ROWS": 3, "LONG": (40,), "WIDE": 5, "WIDE_PROMPT": 6, "SPLIT_PROMPT": 20}.items():
        monkeypatch.setattr(module, name, value)

    def run(**how):
        made = module.Check.__new__(module.Check)
        made.torch, made.device = torch, "cpu"
        made.reference = made._make(module.CONFIGS["qwen"], tmp_path)
        made.steps = Pretended(made.reference, **how)
        monkeypatch.setattr(made, "_force", lambda force: setattr(made.steps, "force", force))
        monkeypatch.setattr(made, "_padding", lambda: {"outputs": 1, "wanted": 1, "left": 0, "of_graphs": 1,
                                                       "hooked": True})  # fmt: skip
        with torch.no_grad():
            return made.check(), made

    return run


def test_every_part_holds_where_steps_are_the_references(checked):
    """Tokens are generated ones, each part has rows of its own, and attention that is broken is noticed in each."""
    found, made = checked()
    assert found["passed"]
    assert (found["rows"], found["wide"]["rows"], found["split"]["rows"]) == (4 * 9, 5 * 3, 4)
    assert found["split"]["served"] == {"eager": {"P": 0, "D": 0, "-": 1}, "graph": {"P": 1, "D": 1, "-": 0}}
    for part in (found, found["wide"], found["split"]):
        assert part["relative_l2_p999"]["graph"] < 1e-5 < part["relative_l2_p999"]["broken"]
        assert part["token_mismatches"]["graph"]["all"] == 0
    assert max(made.steps.decoded) == 16  # the bits of a captured size
    (row,) = made._tokens([7], 4, 3)
    ids = torch.tensor([row])
    with torch.no_grad():
        assert made.reference(ids).logits[0, 6:-1].argmax(-1).tolist() == row[7:]


@pytest.mark.parametrize(("how", "part"), [({"wrong": 0.5}, ""), ({"never": "P"}, ""), ({"never": "D"}, "wide")])
def test_graphs_that_compute_otherwise_or_never_replay_fail(checked, how, part):
    """Any part that fails fails the whole."""
    found, _ = checked(**how)
    assert not found["passed"]
    assert not (found[part] if part else found)["passed"]
