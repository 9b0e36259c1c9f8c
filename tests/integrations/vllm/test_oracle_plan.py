"""A ladder of `kpolicy plan` on vLLM's own dispatchers: what it leaves to run without a graph."""

import pytest

from kpolicy.attention.support import Claims
from kpolicy.ladders import CaptureSizes
from kpolicy.policies import get_policy
from kpolicy.schemas import LadderPlan, write_plan
from kpolicy.settings import Settings
from kpolicy_vllm.config import Config
from tests.integrations.vllm.shimmed import ShimmedVllm
from tests.integrations.vllm.test_oracle_dispatch import RUNNERS, deployment, told
from tests.oracle.configs import Batch, Row
from tests.oracle.loader import loaded, oracle_folder
from tests.oracle.wheels import VLLM_WHEELS

pytestmark = VLLM_WHEELS
SIZES = CaptureSizes((2, 24, 64), (256, 484, 1072, 2048), ())


def planned(path):
    settings = Settings(max_num_reqs=64, max_num_tokens=4096)
    claims = Claims.at_level("mixed")
    keys = get_policy("auto").plan(SIZES, claims, settings)
    write_plan(path, LadderPlan(sizes=SIZES, keys=keys, settings=settings, attention=claims))
    return str(path)


@pytest.mark.parametrize("level", ["mixed", "uniform"])
@pytest.mark.parametrize(("version", "runner"), RUNNERS)
def test_no_mixed_step_up_to_the_largest_size_is_eager(version, runner, level, tmp_path):
    """Whole graphs to 512 where they can be had, else pieces; never none, as stock has pieces for those steps."""
    config = Config(policy="full_and_piecewise", plan=planned(tmp_path / "plan.json"))
    with loaded(oracle_folder(), version) as modules:
        shim = ShimmedVllm(modules, version, runner, policy=get_policy(config.policy), config=config)
        shim.start(deployment(version, runner, (), reqs=64, level=level))
        shim.captured()
        taken = {}
        for prompt in (2, 8, 100, 244, 245, 470, 475, 800, 2036, 2037):
            batch = Batch((*[Row(1, 9, False)] * 12, Row(prompt, 0, True)), 0, None, None)
            told(shim, batch)
            taken[batch.num_tokens] = shim.dispatch(batch)[:2]
    small = "FULL" if level == "mixed" else "PIECEWISE"
    assert taken == {
        14: (small, 256), 20: (small, 256), 112: (small, 256), 256: (small, 256), 257: (small, 484),
        482: (small, 484), 487: ("PIECEWISE", 1072), 812: ("PIECEWISE", 1072), 2048: ("PIECEWISE", 2048),
        2049: ("NONE", 2049),
    }  # fmt: skip
    assert not shim.state.counters.counts
