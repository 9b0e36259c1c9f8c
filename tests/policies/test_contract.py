"""The contract suite over kpolicy's own policies and replicas."""

import attrs
import hypothesis
import pytest

from kpolicy.decision import Decision, Launch
from kpolicy.modes import Mode, Part, Rows
from kpolicy.policies import OWN, get_policy
from kpolicy.reasons import Reason
from kpolicy.testing import POLICY_CHECKS
from kpolicy.testing.policies import graphs_hold_their_rows, ranks_decide_alike

SPECS = [
    *OWN,
    "auto:forms=decodes_beside",
    "auto:forms=none",
    "split:form=beside",
    "split:form=decodes_beside",
    "vllm:runner=v1",
    "vllm:version=0.23,runner=v1",
    "vllm:version=0.23,runner=v2",
]


@pytest.mark.parametrize("check", POLICY_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("spec", SPECS)
def test_contract(spec, check):
    """Every policy keeps the contract."""
    check(lambda: get_policy(spec))


class Careless:
    """Like `full_and_piecewise`, but any graph of a part with enough tokens and rows will do, best or not."""

    reads_costs = False
    name = summary = "careless"

    def __init__(self, part):
        self.part = part

    def __getattr__(self, name):
        return getattr(get_policy("full_and_piecewise"), name)

    def choose(self, numbers, keys, else_take):
        for key in keys:
            rows = key.num_reqs is None or key.num_reqs >= numbers.total_reqs
            if key.part is self.part and key.num_tokens >= numbers.total_tokens > 0 and rows:
                mode = Mode.FULL if key.part is Part.FULL else Mode.PIECEWISE
                return Decision(mode, (Launch(Rows.ALL, key),), Reason.GRAPH_FITS)
        return else_take

    def decide(self, shape, context):
        found = get_policy("full_and_piecewise").decide(shape, context)
        return self.choose(shape.numbers, context.ladder.keys, found)

    def compile(self, context):
        compiled = get_policy("full_and_piecewise").compile(context)
        return CarelessRanks(self, compiled, context.ladder.keys)


@attrs.frozen
class CarelessRanks:
    policy: Careless
    compiled: object
    keys: tuple

    def vote(self, numbers):
        return (*self.compiled.vote(numbers), numbers.total_tokens, numbers.total_reqs)

    def agree(self, reduced, numbers):
        *own, tokens, reqs = reduced
        most = numbers._replace(num_tokens=tokens, num_reqs=reqs)
        return self.policy.choose(most, self.keys, self.compiled.agree(own, numbers))


@pytest.fixture
def unshrunk():
    """Failures are expected here, and nobody reads the smallest one."""
    before = hypothesis.settings.get_current_profile_name()
    hypothesis.settings.register_profile("unshrunk", phases=[hypothesis.Phase.generate])
    hypothesis.settings.load_profile("unshrunk")
    yield
    hypothesis.settings.load_profile(before)


@pytest.mark.usefixtures("unshrunk")
@pytest.mark.parametrize(
    ("part", "check"),
    [(Part.FULL, graphs_hold_their_rows), (Part.FULL, ranks_decide_alike), (Part.PIECEWISE, graphs_hold_their_rows)],
)
def test_graphs_of_the_wrong_kind_are_caught(part, check):
    """A policy that replays any graph with enough tokens and rows, for other lengths or LoRAs, breaks the contract."""
    with pytest.raises(AssertionError, match="doesn't hold its rows"):
        often(check, lambda: Careless(part))


def often(check, make):
    """Batches are drawn anew each time: what is rare comes up."""
    for _ in range(20):
        check(make)


@pytest.mark.usefixtures("unshrunk")
def test_chunks_count_as_decodes_only_where_a_policy_says_so():
    """A replica that takes chunks for decodes, as its original does, breaks the contract unless it declares that."""
    policy = get_policy("vllm:version=0.23,runner=v1")

    class Undeclared:
        treats_chunks_as_decodes = False

        def __getattr__(self, name):
            return getattr(policy, name)

    graphs_hold_their_rows(lambda: policy)
    with pytest.raises(AssertionError, match="doesn't hold its rows"):
        often(graphs_hold_their_rows, Undeclared)
