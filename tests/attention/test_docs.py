"""docs/attention.md against the data, and what importing the package loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kpolicy.attention
from kpolicy.attention import LayerKind
from kpolicy.attention.backends import markdown_table
from kpolicy.attention.hf import architectures
from kpolicy.attention.support import reference_support

DOCS = Path(__file__).parents[2] / "docs" / "attention.md"


def between(name: str) -> str:
    """The generated part of that name in the document."""
    text = DOCS.read_text(encoding="utf-8")
    return text.partition(f"<!-- {name} -->\n")[2].partition(f"\n<!-- end {name} -->")[0]


@pytest.mark.parametrize(
    ("name", "engines"),
    [("vllm", ("vllm-0.23", "vllm-0.33")), ("ascend", ("vllm-ascend",)), ("kunlun", ("vllm-kunlun",))],
)
def test_backend_tables_are_the_data(name: str, engines: tuple[str, ...]) -> None:
    """The document's tables are those that the data gives, so neither can go stale."""
    assert between(name) == markdown_table(*engines)


def test_reference_table_is_the_data() -> None:
    """The document states what is assumed of a layer kind without a backend."""
    rows = {line.split(" | ")[0].lstrip("| "): line for line in between("reference").splitlines()[2:]}
    assert set(rows) == {kind.value for kind in LayerKind}
    for kind in LayerKind:
        assert rows[kind.value].split(" | ")[1].rstrip(" |") == str(reference_support(kind).claims)


def test_every_architecture_is_listed() -> None:
    """The document lists the model types that are known."""
    assert between("architectures").split() == list(architectures())


def test_every_exported_name_is_there() -> None:
    """What the package exports can be had, and what it doesn't have is an AttributeError."""
    assert all(getattr(kpolicy.attention, name) for name in kpolicy.attention.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kpolicy.attention.nothing


def test_importing_the_package_loads_no_tables() -> None:
    """A fresh interpreter that imports the package, or parses a layer kind, has not read the tables."""
    code = (
        "import sys, kpolicy.attention; kpolicy.attention.parse_attention('gdn+gqa');"
        "print([name for name in sys.modules if name.startswith('kpolicy.attention.') and name[18:] != 'support'])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=DOCS.parents[1]
    )
    assert found.stdout.strip() == "[]"
