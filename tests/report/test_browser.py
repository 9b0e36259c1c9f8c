"""The page in headless Chromium: no error on the console, nothing wider than the window, and it answers.

Needs playwright (`pip install playwright`) and a Chromium: one on PATH (Debian: `apt-get install
chromium-headless-shell`), the one of `playwright install chromium`, or the file that KPOLICY_BROWSER names. With
KPOLICY_SCREENSHOTS the pictures are kept in that folder, which is made.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest

from kpolicy.report import gather, page
from kpolicy.scheduling.generator import generate_trace
from kpolicy.simulate import ServiceLevel, Spread
from tests.report.helpers import COSTS, SMALL, small_report
from tests.report.test_page import HOSTILE

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
SIZES = {"phone": (375, 760), "narrow": (320, 568), "desktop": (1280, 900)}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium; skipped where none can be had."""
    api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    named = os.environ.get("KPOLICY_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    with api.sync_playwright() as started:
        if named is None and not Path(started.chromium.executable_path).exists():
            pytest.skip(
                "no Chromium: apt-get install chromium-headless-shell, playwright install chromium, or KPOLICY_BROWSER"
            )
        made = started.chromium.launch(executable_path=named, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of two traces, one of them with a hostile name."""
    two = gather(
        [attrs.evolve(generate_trace(num_requests=15, seed=1), source=HOSTILE)], ["auto", "sglang"], server=SMALL,
        costs=COSTS,
    )  # fmt: skip
    made = attrs.evolve(small_report(), traces=(*small_report().traces, *two.traces))
    written = tmp_path_factory.mktemp("page") / "report.html"
    written.write_text(page(made), encoding="utf-8")
    return written


def keep(name: str, picture: Callable[[], bytes]) -> None:
    """Write a picture to the folder that KPOLICY_SCREENSHOTS names, which is made; without one none is taken.

    Of a page as tall as these on a phone a browser can't take one at times, where the machine is busy.
    """
    folder = os.environ.get("KPOLICY_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / name).write_bytes(picture())


def test_the_folder_of_the_pictures_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With those above it; one that is there is used."""
    monkeypatch.setenv("KPOLICY_SCREENSHOTS", str(tmp_path / "new" / "pictures"))
    for content in (b"one", b"other"):
        keep("a.png", partial(bytes, content))
        assert (tmp_path / "new" / "pictures" / "a.png").read_bytes() == content


class Shown:
    """A page in a window, and what went wrong there."""

    def __init__(self, browser: Any, path: Path, size: str, scheme: str, **rest: Any) -> None:
        width, height = SIZES[size]
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce", **rest
        )
        self.page = self.context.new_page()
        self.wrong: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.wrong.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.wrong.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())

    def __enter__(self) -> Shown:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", list(SIZES))
def test_it_is_shown_without_an_error(browser: Any, path: Path, size: str, scheme: str) -> None:
    """An empty console, only the file itself asked for, nothing wider than the window, light or dark as asked."""
    with Shown(browser, path, size, scheme) as shown:
        keep(f"report-{scheme}-{size}.png", lambda: shown.page.screenshot(full_page=True))
        assert shown.wrong == []
        assert [url for url in shown.asked if not url.startswith(("file:", "data:"))] == []
        inner, wide = shown.page.evaluate("[innerWidth, document.documentElement.scrollWidth]")
        assert wide <= inner
        style = "(({backgroundColor, color}) => [backgroundColor, color])(getComputedStyle(document.body))"
        back, fore = shown.page.evaluate(style)
        assert (brightness(back) > brightness(fore)) == (scheme == "light")
        assert abs(brightness(back) - brightness(fore)) > 160
        assert shown.page.locator(".timeline svg").count() == 2
        assert shown.page.locator("img").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", list(SIZES))
def test_what_is_cut_says_that_it_scrolls(browser: Any, path: Path, size: str, scheme: str) -> None:
    """In words, in a colour that can be read, above each box whose columns don't fit and above no other."""
    from playwright.sync_api import expect

    with Shown(browser, path, size, scheme) as shown:
        for details in shown.page.locator("details").all():
            details.evaluate("e => { e.open = true; }")
        shown.page.wait_for_timeout(100)
        boxes = shown.page.locator(".scroll").evaluate_all(
            """all => all.map(e => {
              const hint = e.previousElementSibling.querySelector(".hint"), style = getComputedStyle(hint);
              return [e.scrollWidth > e.clientWidth, hint.getClientRects().length > 0, hint.innerText, style.color];
            })"""
        )
        assert len(boxes) > 10
        back = shown.page.evaluate("getComputedStyle(document.body).backgroundColor")
        for cut, told, words, colour in boxes:
            assert cut == told
            if told:
                assert "scroll sideways" in words
                assert abs(brightness(colour) - brightness(back)) > 160
        assert any(cut for cut, *_ in boxes) == (size != "desktop")
        shown.page.set_viewport_size({"width": 2000, "height": 900})
        # The page hears of its new size when the browser comes to it, later where other work has the cores.
        expect(shown.page.locator(".hint:visible")).to_have_count(0)


def test_the_policies_fit_a_desktops_window(browser: Any, tmp_path: Path) -> None:
    """All columns, that of the service level too, of numbers as a long trace of an 8B model has them."""
    level = attrs.evolve(SMALL, service_level=ServiceLevel(ttft_ms=500))
    made = gather([generate_trace(num_requests=40, seed=1)], ["auto", "vllm"], server=level, costs=COSTS)
    long: dict[str, Any] = {
        "served": 12_345, "graphs": 122, "graphs_used": 122, "graph_bytes": 1038 << 20,
        "capture_s": 31.05, "ttft": Spread(count=1, p50=199e3, p99=22_179e3), "e2e": Spread(count=1, p50=1e8, mean=1e8),
    }  # fmt: skip
    (trace,) = made.traces
    runs = tuple(attrs.evolve(run, result=attrs.evolve(run.result, **long)) for run in trace.runs)
    written = tmp_path / "report.html"
    written.write_text(page(attrs.evolve(made, traces=(attrs.evolve(trace, runs=runs),))), encoding="utf-8")
    with Shown(browser, written, "desktop", "light") as shown:
        box = shown.page.locator("#compare-0 .scroll")
        keep("report-policies.png", shown.page.locator("#compare-0").screenshot)
        assert box.locator("th[scope=row]").count() > 2
        assert box.evaluate("e => e.scrollWidth <= e.clientWidth")


def brightness(colour: str) -> float:
    """0 to 255 of ``rgb(r, g, b)``."""
    numbers = [float(part) for part in colour.strip("rgba()").split(",")[:3]]
    return sum(numbers) / 3


def test_modes_are_told_apart_without_colour(browser: Any, path: Path) -> None:
    """Each mode has its own pattern and its own letter, and lines their own dashes and marks."""
    with Shown(browser, path, "desktop", "light") as shown:
        swatches = shown.page.locator("#modes-0 .swatch")
        found = swatches.evaluate_all("all => all.map(e => [getComputedStyle(e).backgroundImage, e.textContent])")
        assert len({pattern for pattern, _ in found}) == len({letter for _, letter in found}) == 4
        keys = shown.page.locator("#latency-0 .legend li")
        dashes = keys.evaluate_all("all => all.map(e => e.querySelector('path').getAttribute('stroke-dasharray'))")
        marks = keys.evaluate_all("all => all.map(e => e.querySelector('.mark').textContent)")
        assert len(set(dashes)) == len(set(marks)) == len(dashes) >= 3


def test_a_columns_head_sorts(browser: Any, path: Path) -> None:
    """Numbers first falling and then rising, said to screen readers too; by mouse and by keyboard."""
    with Shown(browser, path, "desktop", "light") as shown:
        table = shown.page.locator("#compare-0 table")
        head = table.locator("thead th", has_text="steps")
        place = head.evaluate("e => e.cellIndex")
        column = f"all => all.map(row => Number(row.cells[{place}].dataset.key))"
        before = table.locator("tbody tr").evaluate_all(column)
        head.locator("button").click()
        assert table.locator("tbody tr").evaluate_all(column) == sorted(before, reverse=True)
        assert head.get_attribute("aria-sort") == "descending"
        head.locator("button").press("Enter")
        assert table.locator("tbody tr").evaluate_all(column) == sorted(before)
        assert head.get_attribute("aria-sort") == "ascending"
        assert shown.wrong == []


def test_the_timeline_zooms(browser: Any, path: Path) -> None:
    """By button, key, wheel and drag; down to single steps, which are told in words."""
    with Shown(browser, path, "desktop", "dark") as shown:
        place = shown.page.locator(".timeline").first
        view = place.locator(".view")
        drawn = [view.inner_html()]

        def changed() -> bool:
            drawn.append(view.inner_html())
            return drawn[-1] != drawn[-2]

        place.get_by_label("zoom in", exact=True).click()
        assert changed()
        view.press("ArrowRight")
        assert changed()
        view.press("0")
        assert changed()
        assert drawn[-1] == drawn[0]
        box = view.bounding_box()
        shown.page.mouse.move(box["x"] + 100, box["y"] + 40)
        shown.page.mouse.down()
        shown.page.mouse.move(box["x"] + 300, box["y"] + 40)
        shown.page.mouse.up()
        assert changed()
        shown.page.keyboard.down("Control")
        shown.page.mouse.wheel(0, -200)
        shown.page.keyboard.up("Control")
        shown.page.wait_for_timeout(100)
        assert changed()
        place.get_by_label("the slowest steps of").first.click()
        assert changed()
        assert view.locator("text.letter").count() > 3
        fills = view.locator("rect.edge").evaluate_all("all => all.map(e => getComputedStyle(e).fill)")
        assert all(fill.startswith("url(") or brightness(fill) > 100 for fill in fills)
        assert any(not fill.startswith("url(") for fill in fills)
        shown.page.mouse.move(box["x"] + 400, box["y"] + 40)
        assert "decode rows" in place.locator(".said").inner_text()
        keep("report-zoomed.png", place.screenshot)
        assert shown.wrong == []


def test_the_map_tells_a_batch(browser: Any, path: Path) -> None:
    """A touch says in words what the cell is."""
    with Shown(browser, path, "phone", "light", has_touch=True, is_mobile=True) as shown:
        shown.page.locator("#map-0 table.map").first.locator("td[title]").nth(5).tap()
        assert "decode rows" in shown.page.locator("#map-0 .said").first.inner_text()
        assert shown.wrong == []


def test_what_is_to_be_pasted_can_be_copied_and_saved(browser: Any, path: Path, tmp_path: Path) -> None:
    """Copying selects the text where the clipboard isn't given, and a file is saved under its name."""
    with Shown(browser, path, "desktop", "light", accept_downloads=True) as shown:
        box = shown.page.locator("#first-0 .paste").first
        box.get_by_role("button", name="Copy").click()
        shown.page.wait_for_timeout(100)
        assert box.get_by_role("button").first.inner_text() in ("Copied", "Selected: press Ctrl+C")
        files = shown.page.locator('.paste[data-file="plan.json"]')
        for details in shown.page.locator("details").all():
            details.evaluate("e => { e.open = true; }")
        if files.count():
            with shown.page.expect_download() as download:
                files.first.get_by_role("button", name="Save plan.json").click()
            assert download.value.suggested_filename == "plan.json"
        assert shown.wrong == []


def test_it_is_readable_without_a_script(browser: Any, path: Path) -> None:
    """Everything but zoom and sorting is there."""
    with Shown(browser, path, "phone", "light", java_script_enabled=False) as shown:
        assert shown.page.locator(".timeline svg.lane").count() >= 4
        assert shown.page.locator("#first-0 pre").first.is_visible()
        assert shown.wrong == []
