"""Reports of small traces, and the parts of a page as a browser reads them."""

from __future__ import annotations

from functools import cache
from html.parser import HTMLParser
from typing import Any

import attrs

from kpolicy.costs import AttentionCost, HostCost
from kpolicy.report import Report, gather
from kpolicy.scheduling.generator import generate_trace
from kpolicy.settings import Settings
from kpolicy.simulate import Server
from tests.simulate.helpers import COSTS as ODD_COSTS

COSTS = attrs.evolve(
    ODD_COSTS, host_eager=HostCost(900.1, 2.1), step_us=3.7, decode_attention=AttentionCost(7.3, 1.1, 0.0037),
    prefill_attention=AttentionCost(5.9, 0.9, 0.0013),
)  # fmt: skip
"""Costs by which graphs gain much."""
SMALL = Server(settings=Settings(max_num_reqs=16, max_num_tokens=128), warm=True, kv_tokens=60_000)
NEEDS_NO_END = frozenset({"meta", "link", "br", "img", "input", "path", "rect"})


@cache
def small_report(policies: tuple[str, ...] = ("auto", "vllm", "eager")) -> Report:
    """Sixty generated requests, by costs that have every cost in them."""
    return gather([generate_trace(num_requests=60, seed=3)], policies, server=SMALL, costs=COSTS)


class Page(HTMLParser):
    """What a browser finds in a page.

    Args:
        html: the page.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        """Text by the elements it lies in: each under its innermost one's name"""
        self.tables: dict[str, list[list[Any]]] = {}
        """Rows of (text, number it is sorted by) by the name of the table's box"""
        self._table: list[list[Any]] | None = None
        self._cell: list[Any] | None = None
        self.feed(html)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert len(given) == len(attrs), f"an attribute twice: {tag} {attrs}"
        self.tags.append((tag, given))
        if tag not in NEEDS_NO_END:
            self.open.append(tag)
        if given.get("class") == "scroll":
            self._table = self.tables.setdefault(str(given["aria-label"]), [])
        elif tag == "tr" and self._table is not None:
            self._table.append([])
        elif tag in ("td", "th") and self._table is not None:
            key = given.get("data-key")
            self._cell = ["", None if key is None else float(key)]
            self._table[-1].append(self._cell)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert tag not in NEEDS_NO_END
        assert self.open.pop() == tag, f"</{tag}> ends another element"
        if tag in ("td", "th"):
            self._cell = None
        elif tag == "table":
            self._table = None

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)
        if self._cell is not None:
            self._cell[0] += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        """Attributes of every element of that name."""
        return [given for name, given in self.tags if name == tag]

    @property
    def ids(self) -> list[str]:
        return [str(given["id"]) for _, given in self.tags if "id" in given]

    def rows(self, label: str) -> list[list[Any]]:
        """The rows of the table with that label, without the head's."""
        (found,) = (rows for name, rows in self.tables.items() if label in name)
        return found[1:]
