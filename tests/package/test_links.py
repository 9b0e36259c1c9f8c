"""Links of the documentation, and pages that code names, lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "integrations/**/*.md", "examples/**/*.md", "benchmarks/**/*.md")
    for path in ROOT.glob(pattern)
)
CODE = sorted(
    path
    for folder in ("kpolicy", "benchmarks", "integrations", "examples", "tests")
    for kind in ("py", "toml")
    for path in (ROOT / folder).rglob(f"*.{kind}")
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"\bdocs/[a-z_]+\.md(?:#[\w-]+)?")


def prose(path: Path) -> str:
    """A page less its blocks of code, in which nothing is a heading or a link."""
    return re.sub(r"^ *```.*?^ *```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", prose(path), flags=re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        same = sum(each == name or re.fullmatch(rf"{re.escape(name)}-\d+", each) is not None for each in found)
        found.add(f"{name}-{same}" if same else name)
    return found


def missing(path: Path, target: str, at: str) -> bool:
    """Whether a file, or a heading in it, isn't there."""
    there = path.parent / target if target else path
    return not there.exists() or bool(at and at not in anchors(there))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(path: Path) -> None:
    """Of those within the repository; `pip` and others' pages aren't asked."""
    links = [link.partition("#") for link in LINK.findall(prose(path)) if "://" not in link]
    assert [f"{target}#{at}" for target, _, at in links if missing(path, target, at)] == []


def test_every_page_that_code_names_is_there() -> None:
    """In docstrings, comments, messages and settings."""
    named = {(path, name) for path in CODE for name in NAMED.findall(path.read_text(encoding="utf-8"))}
    assert len(named) > 10
    gone = [
        (str(path.relative_to(ROOT)), name)
        for path, name in sorted(named)
        if missing(ROOT / "README.md", *name.partition("#")[::2])
    ]
    assert gone == []


def test_every_page_is_reached_from_the_readme() -> None:
    """In one link or two."""
    seen, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        links = (link.partition("#")[0] for link in LINK.findall(prose(page)) if "://" not in link)
        left += [(page.parent / link).resolve() for link in links if link]
    assert set((ROOT / "docs").glob("*.md")) <= seen


def test_headings_are_named_as_github_names_them() -> None:
    """Signs go, spaces become dashes, and a name that comes again has a number."""
    made = {"## `Engine.step` against a bare step": "enginestep-against-a-bare-step"}
    for heading, name in made.items():
        assert name in anchors(ROOT / "docs" / "benchmarks.md"), heading
