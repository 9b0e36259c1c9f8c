"""`Chooser`: from the counts of a step to the graph of vLLM's that replays it.

Both runners ask for a graph with little more than counts, so the answer to a count is prepared once and kept: the hot
path is one look-up. Decodes have a cell for each number of them; steps with prompt chunks have one for each number of
tokens and class of decodes beside them (`classes`), filled at start-up.

KV lengths are left out on purpose. Attention on the real KV is the same in every way to run a whole batch, so it can
tip the choice only where two ways differ by less than their padding, and counts are what every rank and both runners
have. What the policy says is checked before it is kept: a graph that isn't captured or doesn't hold the step is
refused, counted, and vLLM's own rule answers instead. At sizes that vLLM by itself has graphs of, `auto` takes more
launches than vLLM would only for a gain that the costs are sure of (`kpolicy_vllm.doubt`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Any

from kpolicy.decision import Decision
from kpolicy.errors import NoLegalModeError
from kpolicy.keys import GraphKey
from kpolicy.modes import Mode, Part, Rows
from kpolicy.policies import get_policy
from kpolicy.shapes import BatchNumbers
from kpolicy_vllm.doubt import clearly_cheaper, surely_cheaper
from kpolicy_vllm.state import Select, State
from kpolicy_vllm.steps import Entry, Step, classes, numbers_of

__all__ = ["OWN_RULE", "WITHIN_DOUBT", "Chooser"]

OWN_RULE = "vllm_rule"
"""The reason in counters where vLLM's own rule decided."""
WITHIN_DOUBT = "within_doubt"
"""The same where the costs aren't sure that more launches are cheaper."""
_MOST_ENTRIES = 1 << 18
_MOST_ABOVE = 1 << 14
_MOST_CLASSED = 2048
"""Tokens up to which decodes beside a chunk are told apart by their number"""
_MODE_OF = {Part.FULL: Mode.FULL, Part.PIECEWISE: Mode.PIECEWISE}


class Chooser:
    """The answers of one vLLM, prepared as they are first asked for.

    Args:
        state: what kpolicy knows of this vLLM.
        eager: ``eager(num_tokens, num_reqs)``: vLLM's answer for a step without a graph.
        answer: ``answer(mode_name, descriptor)``: vLLM's answer for a step with one.

    Attributes:
        desc_of, key_of: vLLM's descriptors by kpolicy's keys, and the reverse; every key that may be captured.
        entries: the prepared answers.
        largest: tokens of the largest captured graph.
    """

    def __init__(self, state: State, eager: Callable[[int, int], Any], answer: Callable[[Part, Any], Any]) -> None:
        self.state = state
        self.query_len = state.settings.query_len
        self._eager = eager
        self._answer = answer
        self.desc_of: dict[GraphKey, Any] = {}
        self.key_of: dict[Any, GraphKey] = {}
        self.entries: dict[Step, Entry] = {}
        self.forced: Any = None
        self._own: tuple[GraphKey, ...] = ()
        self._vllm_largest = max(state.listed or get_policy("vllm").sizes(state.settings).piecewise, default=0)
        self._captured: frozenset[GraphKey] = frozenset()
        self.largest = 0
        self.class_of, self._decodes_of = classes(state.settings.max_num_reqs)
        self._cells: list[list[Entry | None]] = []
        self._above: dict[int, Entry] = {}
        self._gone: dict[tuple[str, str], tuple[int, int, int]] = {}
        self._gone_hits: Counter[GraphKey] = Counter()
        self._counted: Counter[GraphKey] = Counter()
        self._folding = Lock()
        self.on_refresh: Callable[[], None] = lambda: None

    def set_keys(self, descs: Mapping[GraphKey, Any]) -> None:
        """The graphs that vLLM captures from now on."""
        self.desc_of = dict(descs)
        self.key_of = {desc: key for key, desc in descs.items()}
        self.state.registry.plan(self.desc_of)
        self.refresh()

    def refresh(self) -> None:
        """Forget the prepared answers: graphs or costs have changed."""
        self._fold()
        view = self.state.ladder
        parts = (Part.FULL, Part.PIECEWISE)
        self._own = tuple(key for part in parts for key in view.keys if key.part is part)
        self._captured = frozenset(view.keys).intersection(self.desc_of)
        self.largest = max((key.num_tokens for key in self._captured), default=0)
        self._cells = [[None] * (self.largest + 1) for _ in self._decodes_of]
        self._above = {}
        self.on_refresh()

    @contextmanager
    def forcing(self, result: Any) -> Iterator[None]:
        """Answer exactly so while the context lasts: for captures and for timing one graph."""
        before, self.forced = self.forced, result
        try:
            yield
        finally:
            self.forced = before

    def cell(self, num_tokens: int, num_decodes: int) -> Entry:
        """The prepared answer for a step with prompt chunks beside that many decodes.

        The decodes are taken as those of their class: how many there are hardly tells one way from another, and beside
        a long chunk not at all.
        """
        if num_tokens > self.largest:
            # No graph is that large, whatever is in the step.
            return self._above.get(num_tokens) or self._fill_above(num_tokens)
        number = self.class_of[num_decodes] if num_tokens <= _MOST_CLASSED else 0
        row = self._cells[number]
        return row[num_tokens] or self._fill(row, num_tokens, self._decodes_of[number])

    def _fill(self, row: list[Entry | None], num_tokens: int, num_decodes: int) -> Entry:
        decodes = min(num_decodes, (num_tokens - 1) // self.query_len, self.state.settings.max_num_reqs - 1)
        entry = row[num_tokens] = self.entry(Step(num_tokens, decodes + 1, decodes))
        return entry

    def _fill_above(self, num_tokens: int) -> Entry:
        entry = self._above[num_tokens] = self.entry(Step(num_tokens, 1, 0))
        return entry

    def prepare(self) -> None:
        """Fill the cells of steps with chunks, so that none of them costs a step of serving."""
        for row, decodes in zip(self._cells, self._decodes_of, strict=True):
            for tokens in range(1, (self.largest if row is self._cells[0] else min(self.largest, _MOST_CLASSED)) + 1):
                self._fill(row, tokens, decodes)
        for tokens in range(self.largest + 1, min(self.state.settings.max_num_tokens, _MOST_ABOVE) + 1):
            self._fill_above(tokens)

    def entry(self, step: Step) -> Entry:
        """The prepared answer for a step, made now if need be."""
        found = self.entries.get(step)
        if found is None:
            if len(self.entries) >= _MOST_ENTRIES:
                self.refresh()
            found = self.entries[step] = self._made(step)
        return found

    def agreed(self, step: Step) -> Entry:
        """The answer where the caller names the one mode: by vLLM's own rule, which all ranks share.

        Ranks that agreed on a size ask for it again, and must be given that size.
        """
        return self._by_own_rule(step, OWN_RULE)

    def _made(self, step: Step) -> Entry:
        state = self.state
        select = state.select_lora if step.num_active_loras else state.select
        if select is None:
            return self._by_own_rule(step, OWN_RULE)
        numbers = numbers_of(step, self.query_len)
        try:
            asked = select(*numbers)
            decision = self.surer(asked, select, numbers)
            wrong = self._wrong(decision, numbers, step)
            if not wrong:
                key = decision.launches[0].key if decision.launches else None
                return self._entry(step, key, decision, asked.reason.value if decision is asked else WITHIN_DOUBT)
            # What isn't made as a decision can't be said either.
            decided = str(decision)
        except NoLegalModeError:
            return self._by_own_rule(step, OWN_RULE)
        except Exception as error:  # noqa: BLE001 - a policy is anyone's code, and serving goes on without it
            state.counters.warn_once(
                "policy_failed",
                f"policy {state.config.policy!r} raised for {step}: {type(error).__name__}: {error}. "
                "vLLM's own rule decides this batch.",
            )
            return self._by_own_rule(step, "policy_failed")
        state.counters.warn_once(
            "illegal_decision",
            f"policy {state.config.policy!r} decided {decided} for {step}, but {wrong}. "
            "vLLM's own rule decides this batch.",
        )
        return self._by_own_rule(step, "illegal_decision")

    def surer(self, decision: Decision, select: Select, numbers: BatchNumbers) -> Decision:
        """The decision, or the best of fewer launches where it has more than vLLM's would and isn't surely cheaper.

        Of batches that its own sizes hold, vLLM runs decodes in a FULL graph and others in pieces. Larger ones it runs
        eagerly: of eager decodes there only what is within noise isn't sure, and of two ways as quick the one with
        fewer launches is taken, as the host has more to do for many requests than launching. So decodes of any number
        leave their FULL graph for pieces only where that is sure: those run the same kernels, of which the one curve is
        told by decode rows and the other by prompts. Nor do they leave a graph for a way that wasn't timed to as many
        tokens: a Llama's eager steps of 768 took 25.6 ms, where the line on from 256 had 15.7.

        Of larger steps with prompts vLLM's eager one is sure too where no slow host makes it dearer than the graph: it
        runs the graph's kernels without its padding. Data-parallel engines that agree on each step all run the least of
        their modes, so that one's eager step costs others their graphs: with several it is as with decodes.
        """
        costs, timed = self.state.weighed, self.state.timed
        if costs is None or timed is None or numbers.total_tokens > self.largest:
            return decision
        more = (Mode.EAGER,) if numbers.num_prefills else (Mode.EAGER, Mode.PIECEWISE)
        unpadded = numbers.num_prefills > 0 and self.state.num_dp_ranks == 1
        forbidden = numbers.forbidden
        for mode in more:
            forbidden |= mode.bit
            if decision.mode is mode:
                try:
                    fewer = select(*numbers._replace(forbidden=forbidden))
                except NoLegalModeError:
                    break
                ours, theirs = (each.launches[0].key for each in (decision, fewer))
                if mode is Mode.EAGER and numbers.total_tokens > self._vllm_largest:
                    sure = clearly_cheaper(costs, ours, theirs, numbers)
                    sure = sure or (unpadded and surely_cheaper(costs, ours, theirs, numbers, noise=0.0))
                else:
                    sure = surely_cheaper(costs, ours, theirs, numbers)
                if sure and (numbers.num_prefills or timed.spans(decision.launches, numbers)):
                    break
                decision = fewer
        return decision

    def _entry(self, step: Step, key: GraphKey | None, decision: Decision | None, reason: str) -> Entry:
        if key is None:
            result = self._eager(step.num_tokens, step.num_reqs)
        else:
            result = self._answer(key.part, self.desc_of[key])
        return Entry(step, result, key, decision, reason)

    def _wrong(self, decision: Decision, numbers: BatchNumbers, step: Step) -> str:
        """What is wrong with a decision of the policy; empty where it can be carried out."""
        if decision.mode is Mode.SPLIT or len(decision.launches) > 1:
            return "one step of vLLM's runs one graph"
        launch = decision.launches[0] if decision.launches else None
        if launch is None or launch.rows is not Rows.ALL or launch.repeat != 1:
            return "it doesn't run every row once"
        key = launch.key
        if decision.mode is not (Mode.EAGER if key is None else _MODE_OF.get(key.part)):
            return f"its mode is {decision.mode}"
        if key is None:
            return "eager is forbidden for it" if step.forbidden & Mode.EAGER.bit else ""
        return self.unfit(key, numbers, step)

    def unfit(self, key: GraphKey, numbers: BatchNumbers, step: Step) -> str:
        """Why the graph can't replay the step; empty where it can."""
        if key not in self._captured:
            return f"{key} isn't captured"
        mode = _MODE_OF[key.part]
        if step.forbidden & mode.bit:
            return f"{mode} is forbidden for it"
        if self.state.loras_apart and bool(key.lora_case) is not bool(step.num_active_loras):
            return f"{key} is for another number of LoRA adapters"
        return "" if key.holds_batch(numbers) else f"{key} doesn't hold it"

    def _by_own_rule(self, step: Step, reason: str) -> Entry:
        """vLLM's rule over our ladders: the next size of a FULL graph, else of a PIECEWISE one, else no graph."""
        numbers = numbers_of(step, self.query_len)
        for key in self._own:
            if not self.unfit(key, numbers, step):
                return self._entry(step, key, None, reason)
        return self._entry(step, None, None, reason)

    # Counting

    def _fold(self) -> None:
        """Take what the prepared answers counted into the sums, and drop them."""
        with self._folding:
            entries = list(self.entries.values())
            self._gone, self._gone_hits = self._summed(entries), self._hits(entries)
            self.entries = {}

    def _summed(self, entries: Iterable[Entry]) -> dict[tuple[str, str], tuple[int, int, int]]:
        sums = dict(self._gone)
        for entry in entries:
            if entry.count:
                steps, tokens, padding = sums.get(entry.label, (0, 0, 0))
                sums[entry.label] = (
                    steps + entry.count,
                    tokens + entry.count * entry.step.num_tokens,
                    padding + entry.count * entry.padding,
                )
        return sums

    def _hits(self, entries: Iterable[Entry]) -> Counter[GraphKey]:
        hits = self._gone_hits.copy()
        for entry in entries:
            if entry.key is not None and entry.count:
                hits[entry.key] += entry.count
        return hits

    def tallies(self) -> dict[tuple[str, str], tuple[int, int, int]]:
        """Steps, tokens and padding tokens so far, by mode and reason."""
        with self._folding:
            return self._summed(list(self.entries.values()))

    def count_hits(self) -> None:
        """Bring the registry's hits up to date."""
        with self._folding:
            # Whoever reads the metrics page in this process asks too, beside the thread that sums up.
            for key, total in self._hits(list(self.entries.values())).items():
                more = total - self._counted[key]
                if more > 0:
                    self.state.registry.hit(key, more)
                    self._counted[key] = total
