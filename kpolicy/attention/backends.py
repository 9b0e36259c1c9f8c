"""Attention backends of the serving engines: what each declares to its engine, and what we claim of it.

Two things are kept apart. `Backend.declared` is the level that the engine reads at start-up, right or wrong: replicas
resolve modes from it. `Backend.claims` is what a captured graph of it may hold: everything else reads that. The rows
are data, in `vllm_backends` and `vendor_backends`; this module finds them by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from functools import cache
from types import MappingProxyType

import attrs

from kpolicy.attention.support import AttentionSupport, Claims, LayerKind, Origin
from kpolicy.errors import SupportError, UnknownNameError

__all__ = ["Backend", "DeclaredLevel", "backend_support", "backends", "markdown_table", "variants"]


class DeclaredLevel(IntEnum):
    """The level an engine's attention backend declares, lowest first: the engine takes the least over its layers."""

    NEVER = 0
    """No graph may hold this attention."""
    SINGLE = 1
    """Decode rows of one token each."""
    UNIFORM = 2
    """Rows that all have the same number of tokens."""
    ALWAYS = 3
    """Any rows. Read as "prefill beside decode too", also where it was meant as "decodes of different lengths"."""

    def __str__(self) -> str:
        return self.name.lower()


def _kinds(value: Iterable[LayerKind]) -> frozenset[LayerKind]:
    return frozenset(value)


@attrs.frozen
class Backend:
    """One attention backend of one engine, under one condition.

    Args:
        engine: the engine and its version, for example ``vllm-0.33``.
        name: the backend, with its condition in brackets where it has variants: ``FLASH_ATTN[fa3]``.
        kinds: the layer kinds it runs.
        declared: the level that the engine reads at start-up.
        claims: what a captured graph of it may hold.
        source: project, version, file and line of the declaration.
        note: a condition, or why the claims differ from the declaration.
    """

    engine: str
    name: str
    kinds: frozenset[LayerKind] = attrs.field(converter=_kinds)
    declared: DeclaredLevel
    claims: Claims
    source: str
    note: str = ""

    @property
    def full_name(self) -> str:
        """The name it is found by: ``engine/name``."""
        return f"{self.engine}/{self.name}"

    @property
    def family(self) -> str:
        """The full name without the condition."""
        return self.full_name.partition("[")[0]

    def support(self, kind: LayerKind | None = None) -> AttentionSupport:
        """Its claims for one layer kind; without a kind, for its only one or for any."""
        if kind is None and len(self.kinds) == 1:
            (kind,) = self.kinds
        return AttentionSupport(self.claims, [Origin(kind, self.full_name, self.claims, self.source, self.note)])


@cache
def backends() -> Mapping[str, Backend]:
    """Every row by full name, in the order of the tables."""
    from kpolicy.attention.vendor_backends import VENDOR_BACKENDS
    from kpolicy.attention.vllm_backends import VLLM_BACKENDS

    return MappingProxyType({row.full_name: row for row in (*VLLM_BACKENDS, *VENDOR_BACKENDS)})


@cache
def _by_folded_name() -> Mapping[str, tuple[Backend, ...]]:
    """Rows by lower-case name: each under its full name, and all variants together under the name without condition."""
    found: dict[str, tuple[Backend, ...]] = {}
    for row in backends().values():
        family = row.family.lower()
        found[family] = (*found.get(family, ()), row)
        found[row.full_name.lower()] = (row,)
    return found


def variants(name: str) -> tuple[Backend, ...]:
    """The rows a name stands for: the row of that full name or, for a name without condition, all its variants.

    Case doesn't matter: vLLM's names are upper case and those of the plug-ins are not.

    Raises:
        UnknownNameError: no row has that name. A bare ``FLASH_ATTN`` is one too: say which engine's.
    """
    rows = _by_folded_name().get(str(name).lower())
    if rows is None:
        raise _unknown(str(name))
    return rows


def _unknown(name: str) -> UnknownNameError:
    import difflib

    engine = name.partition("/")[0].lower()
    rows = backends().values()
    known = {row.full_name.lower(): row.full_name for row in rows if row.engine == engine} or {
        row.full_name.lower(): row.full_name for row in rows
    }
    if "/" not in name:
        same = sorted({row.family for row in rows if row.family.partition("/")[2].lower() == name.lower()})
        hint = f"Say which engine's: {' or '.join(same)}." if same else "Names are ENGINE/BACKEND[VARIANT]."
    else:
        near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.8)
        hint = f"Nearest: {', '.join(known[each] for each in near)}." if near else "docs/attention.md lists them."
    return UnknownNameError("attention backend", name, known.values(), hint)


def backend_support(name: str, kind: LayerKind | None = None) -> AttentionSupport:
    """What a backend lets be captured, by full name.

    A name without its condition (``vllm-0.33/FLASH_ATTN``) stands for the meet of all its variants that run the kind:
    what holds whichever of them the engine picks. The origins then name every variant.

    Args:
        name: ``ENGINE/BACKEND`` or ``ENGINE/BACKEND[VARIANT]``.
        kind: the layer kind it is to run; None for any.

    Raises:
        UnknownNameError: no backend has that name.
        SupportError: the backend doesn't run layers of that kind.
    """
    rows = variants(name)
    fitting = [row for row in rows if kind is None or kind in row.kinds]
    if not fitting:
        runs = ", ".join(sorted({str(each) for row in rows for each in row.kinds}))
        raise SupportError(f"{name} doesn't run {kind} layers; it runs {runs}. Pick a backend of that kind.")
    return AttentionSupport.meet_all(row.support(kind) for row in fitting)


def markdown_table(*engines: str) -> str:
    """The rows of these engines as a Markdown table, as docs/attention.md has them.

    With several engines, those after the first share the rows of the same name, a pair of columns each.
    """
    rows = [row for row in backends().values() if row.engine in engines]
    pairs = [f"{engine} declares | a graph may hold" for engine in engines]
    lines = [f"| backend | runs | {' | '.join(pairs)} |", "|---" * (2 + 2 * len(engines)) + "|"]
    # A name's place is where the engine that has most rows puts it.
    longest = max(engines, key=lambda engine: sum(row.engine == engine for row in rows))
    names = dict.fromkeys([row.name for row in rows if row.engine == longest] + [row.name for row in rows])
    for name in names:
        found = {row.engine: row for row in rows if row.name == name}
        some = next(iter(found.values()))
        kinds = (
            "any" if some.kinds == frozenset(LayerKind) else ", ".join(k.value for k in LayerKind if k in some.kinds)
        )
        cells = [f"{found[each].declared} | {found[each].claims}" if each in found else "- | -" for each in engines]
        lines.append(f"| {name} | {kinds} | {' | '.join(cells)} |")
    return "\n".join(lines)
