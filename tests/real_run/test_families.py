"""Every architecture under every policy: the tokens of transformers' own generate, each step EAGER's to the bit."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.policies import policy_names  # noqa: E402
from kpolicy.scheduling.batching import Generation  # noqa: E402
from kpolicy.serving.load import load  # noqa: E402
from kpolicy.serving.real_run import Serving, serve_model  # noqa: E402
from kpolicy.trace_run import Prompts  # noqa: E402
from tests.real_run.helpers import LADDER, SETTINGS, right, trace_of  # noqa: E402
from tests.serving_models.families import FAMILIES  # noqa: E402

REQUESTS = trace_of((0.0, 9, 4), (0.001, 5, 6), (0.002, 21, 3), (0.003, 1, 5))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_policy_gives_the_tokens_of_generate(one_thread: None, family: str) -> None:
    model = load(FAMILIES[family], num_blocks=48, block_size=4, max_num_reqs=SETTINGS.max_num_reqs)
    serving = Serving(model=model, settings=SETTINGS, ladder=LADDER)
    prompts = Prompts(seed=5, vocab=model.vocab)
    known: dict[tuple[int, ...], bool] = {}

    def check(request: Generation) -> bool:
        # Most policies give a request the same tokens: transformers is asked once.
        tokens = tuple(request.tokens[: request.num_prompt].tolist()), tuple(request.generated)
        if tokens not in known:
            known[tokens] = right(model, list(tokens[0]), list(tokens[1]))
        return known[tokens]

    for policy in sorted(policy_names()):
        engine = serving.engine(policy)
        engine.capture()
        try:
            result, differences = serve_model(REQUESTS, engine, serving, prompts, label=policy, check=check)
        finally:
            engine.release()
        assert differences == ()
        assert (result.served, result.checked, result.wrong) == (4, 4, ()), policy
