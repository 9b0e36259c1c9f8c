"""Decode steps of data-parallel ranks through SGLang's own votes and checks, with costs of each rank's own."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kpolicy.settings import Objective
from kpolicy_sglang import dispatch, votes
from kpolicy_sglang.counters import lines
from kpolicy_sglang.phase import DECODE, Phase, table_of
from kpolicy_sglang.versions import KNOWN
from tests.integrations.sglang.test_oracle import release_of
from tests.integrations.sglang.test_oracle_ranks import MODES
from tests.oracle.sglang_real import MARKS, _execute, _named, decode_runner
from tests.oracle.test_sglang import random_sizes

DEPLOYMENTS, STEPS = 100, 40
VOTING = "sglang/srt/managers/scheduler_components/dp_attn.py"
KINDS = ["DECODE", "DECODE", "DECODE", "IDLE", "EXTEND"]

pytestmark = MARKS


class Newer:
    """0.5.23: `_local_decode_cuda_graph_vote`, whose answers are reduced to their least."""

    def __init__(self, release: Any) -> None:
        found = _execute(_named(release.tree(VOTING), {"_local_decode_cuda_graph_vote"}), {})
        self._vote = found["_local_decode_cuda_graph_vote"]

    def votes(self, ranks: list[Any], *, hooked: bool) -> list[bool]:
        """What each rank hears after the reduction."""
        said = []
        for rank in ranks:
            asked = {"local_batch": rank.scheduled, "disable_cuda_graph": False}
            with rank.speaking():
                said.append(votes.decode_vote(self._vote, **asked) if hooked else self._vote(**asked))
        return [all(said)] * len(ranks)


class Older:
    """0.5.16: the vote is inside `prepare_mlp_sync_batch_raw`, which is run whole, over a gather of its own."""

    def __init__(self, release: Any) -> None:
        self._gathered: list[Any] | None = None
        preparer = SimpleNamespace(prepare_all_gather=lambda _: (True, 0), compute_output=lambda _: (None, None))
        names: dict[str, Any] = {
            "MLPSyncBatchInfo": self._info, "ForwardMode": MODES, "TboDPAttentionPreparer": lambda: preparer,
            "envs": _Unset(), "check_cuda_graph_backend": lambda *_: False, "world_dp_gather_enabled": lambda: False,
            "Phase": _Unset(), "Backend": _Unset(), "_ENABLE_METRICS_DP_ATTENTION": False,
            "SchedulerRecvSkipper": SimpleNamespace(derive_forward_mode=lambda _: None),
        }  # fmt: skip
        functions = {"prepare_mlp_sync_batch_raw", "_update_gather_batch"}
        self._raw = _execute(_named(release.tree(VOTING), functions), names)["prepare_mlp_sync_batch_raw"]

    def _info(self, **fields: Any) -> Any:
        """SGLang's record of one rank, whose gather takes the others' from the round before."""
        made = SimpleNamespace(**fields, tp0_info=_Table())

        def all_gather(**_: Any) -> None:
            self._now.append(made)
            every = self._gathered or [made]
            made.global_num_tokens = [each.num_tokens for each in every]
            made.global_num_tokens_for_logprob = [each.num_tokens_for_logprob for each in every]
            made.own, made.can_cuda_graph = made.can_cuda_graph, all(each.can_cuda_graph for each in every)

        made.all_gather = all_gather
        return made

    def votes(self, ranks: list[Any], *, hooked: bool) -> list[bool]:
        """What each rank hears: once to gather what they say, and once more to be told."""
        self._gathered = None
        for turn in range(2):
            self._now: list[Any] = []
            heard = []
            for rank in ranks:
                batch = None if rank.kind == "IDLE" else rank.scheduled
                given = {
                    "dp_size": len(ranks), "attn_tp_size": 1, "attn_cp_size": 1, "disable_cuda_graph": False,
                    "tp_group": SimpleNamespace(cpu_group=None, device_group=None, device="cpu"),
                    "get_idle_batch": rank.idle, "require_mlp_tp_gather": True, "disable_overlap_schedule": True,
                    "offload_tags": set(),
                }  # fmt: skip
                with rank.speaking():
                    made = votes.decode_vote_0_5_16(self._raw, batch, **given) if hooked else self._raw(batch, **given)
                heard.append(getattr(made, "can_run_dp_cuda_graph", True))
            if not turn:
                self._gathered = self._now
                for info in self._gathered:
                    info.can_cuda_graph = info.own
        return heard


class _Unset:
    """Settings that are off, and names that nothing is asked of."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(get=lambda: False)


class _Table:
    """A gathered tensor that nobody reads."""

    def __getitem__(self, _: Any) -> Any:
        return SimpleNamespace(tolist=list)


VERSIONS = {"0.5.16": Older, "0.5.23": Newer}


class Rank:
    """What one rank runs in a step, under its own phase."""

    def __init__(self, kind: str, size: int, phase: Phase | None) -> None:
        self.kind, self.size, self.phase = kind, size, phase
        mode = getattr(MODES, kind)
        mode.is_extend = lambda: kind == "EXTEND"
        self.scheduled = SimpleNamespace(
            forward_mode=mode, batch_size=lambda: size, extend_num_tokens=size, extend_logprob_start_lens=[0],
            extend_lens=[1], return_logprob=True,
        )  # fmt: skip

    def idle(self) -> Any:
        return SimpleNamespace(forward_mode=MODES.IDLE)

    @contextmanager
    def speaking(self) -> Any:
        """SGLang runs each rank in a process of its own; here they take turns."""
        runner = SimpleNamespace()
        if self.phase is not None:
            setattr(runner, dispatch.ATTRIBUTE, self.phase)
        votes.speak_for(SimpleNamespace(decode_cuda_graph_runner=runner))
        yield
        votes.speak_for(None)


def _runner(release: Any, sizes: Any) -> Any:
    made = decode_runner(release)()
    made.__dict__.update(
        ragged_verify_mode=False, captured_req_width=1, require_mlp_tp_gather=True, require_mlp_sync=True,
        enable_pdmux=False, disable_padding=False, backend=None, max_bs=sizes[-1], is_encoder_decoder=False,
        enable_two_batch_overlap=False, capture_hidden_mode=0,
        model_runner=SimpleNamespace(spec_algorithm=SimpleNamespace(is_ngram=lambda: False)),
    )  # fmt: skip
    made._max_dp_batch_size = lambda batch: max(batch.original_global_num_tokens_cpu)
    return made


def _at_step(runner: Any, rank: Rank, tokens: list[int], *, heard: bool, hooked: bool) -> bool:
    """SGLang's check as the step runs, through the hook or not."""
    batch = SimpleNamespace(
        replace_embeds=None, spec_info=None, batch_size=rank.size, original_global_num_tokens_cpu=tokens,
        global_num_tokens_cpu=tokens, can_run_decode_cuda_graph=heard, can_run_dp_cuda_graph=heard,
        capture_hidden_mode=0, forward_mode=rank.scheduled.forward_mode,
    )  # fmt: skip
    own = type(runner).can_run_graph
    if not hooked:
        return bool(own(runner, batch))
    setattr(runner, dispatch.ATTRIBUTE, rank.phase)
    return bool(dispatch.decode_can_run(own, runner, batch))


@pytest.mark.parametrize("version", KNOWN)
@pytest.mark.parametrize("costs", ["of each rank's own", "the same", "none"])
def test_ranks_stay_together_and_only_leave_graphs(version, costs):
    """All busy ranks replay or none; with no costs where SGLang's do, else only where SGLang's do and all want it."""
    release, rng, outcomes = release_of(version), random.Random(5), Counter()  # noqa: S311  not for secrets
    voting = VERSIONS[version](release)
    for _ in range(DEPLOYMENTS):
        sizes = random_sizes(rng, 64)
        runner, count = _runner(release, sizes), rng.choice([2, 2, 3])
        phases = [Phase(DECODE, sizes, 80, full=True) for _ in range(count)]
        seed = rng.random()
        for phase in phases:
            own = rng if costs == "of each rank's own" else random.Random(seed)  # noqa: S311
            if costs != "none":
                table = table_of("test", {size: own.randint(1, 100) for size in sizes}, {1: own.randint(20, 100)})
                phase.install("auto", table, Objective())
        steps = 0
        for _ in range(STEPS):
            ranks = [Rank(rng.choice(KINDS), rng.randint(1, 70), phase) for phase in phases]
            busy = [rank for rank in ranks if rank.kind == "DECODE"]
            tokens = [0 if rank.kind == "IDLE" else rank.size for rank in ranks]
            if not busy:
                continue
            found = {}
            for hooked in (False, True):
                heard = dict(zip(ranks, voting.votes(ranks, hooked=hooked), strict=True))
                ran = [_at_step(runner, rank, tokens, heard=heard[rank], hooked=hooked) for rank in busy]
                assert len(set(ran)) == 1, (hooked, [(rank.kind, rank.size) for rank in ranks])
                found[hooked] = ran[0]
            wanted = found[False] and not any(rank.phase.wants_eager(rank.size) for rank in busy)
            assert found[True] == wanted
            assert costs != "none" or found[True] == found[False]
            steps += len(busy)
            outcomes[found[False], found[True]] += 1
        counted = [line for phase in phases for line in lines(phase)]
        assert sum(line.steps for line in counted) == steps
    assert min(outcomes[True, True], outcomes[False, False]) > 500, outcomes
    assert (outcomes[True, False] > 200) == (costs != "none")
    assert not outcomes[False, True]
