"""The pages in a real headless browser: wide and narrow, light, dark and on paper. Skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulated_traces import plain_of

from eval.comparison_page import render_page as render_comparison
from eval.report import Run, build_report
from eval.report_page import render_page
from tests.browser import Browser, running
from tests.test_comparison import compared, evaluated
from tests.test_report import META, advice, full_report, head_traces

DRAFTS = {"eagle3": 0.08, "medusa": 0.0, "a_head_of_a_rather_long_name": 0.03}
MOST_BYTES = 2_000_000
CHARTS = """(() => {
  const inside = (a, b) => a.left > b.left - 1 && a.right < b.right + 1 && a.top > b.top - 1 && a.bottom < b.bottom + 1
  const apart = (a, b) => a.right < b.left + 1 || b.right < a.left + 1 || a.bottom < b.top + 2 || b.bottom < a.top + 2
  return [...document.querySelectorAll("figure svg, figure img")].map(svg => {
    const frame = svg.getBoundingClientRect(), texts = [...svg.querySelectorAll("text")]
    const boxes = texts.map(text => text.getBoundingClientRect())
    return {
      width: frame.width,
      height: frame.height,
      smallest: Math.min(...texts.map(t => parseFloat(getComputedStyle(t).fontSize))) * svg.getScreenCTM().a,
      cut: texts.filter((_, i) => !inside(boxes[i], frame)).map(t => t.textContent),
      overlapping: texts.filter((_, i) => boxes.some((b, j) => i < j && !apart(boxes[i], b))).map(t => t.textContent),
      colours: [...new Set([...svg.querySelectorAll("path,use,text")].flatMap(
        e => [getComputedStyle(e).stroke, getComputedStyle(e).fill]))],
    }
  })
})()"""
WIDTHS = "[document.documentElement.scrollWidth, document.documentElement.clientWidth, innerWidth]"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running(tmp_path_factory.mktemp("browser")) as one:
        yield one


def crowded_report() -> dict[str, Any]:
    """More drafts, slices and depth than a picture is made for, under long names."""
    traces = head_traces(18, 12)
    traces = [replace(t, slice=f"{'a long name of a slice, no. ' * (i % 2)}{i % 6}") for i, t in enumerate(traces)]
    plain = [replace(plain_of(t), seconds=(2 + i % 3) * t.seconds) for i, t in enumerate(traces)]
    drafts = [Run(f"{name}_of_a_rather_long_name", "float32", 0.0, 12, traces) for name in "abcde"]
    runs = [*drafts, Run("none", "float32", 0.0, 0, plain)]
    return build_report(runs=runs, load=advice(columns=12), resamples=50, **META)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int]]:
    """Each page and how many pictures it has."""
    folder = tmp_path_factory.mktemp("pages")
    drafts = [evaluated(name, shift, seed, lookup=seed == 1) for seed, (name, shift) in enumerate(DRAFTS.items())]
    made = {
        "full": (render_page(full_report()), 8),
        "crowded": (render_page(crowded_report()), 8),
        "comparison": (render_comparison(compared(*drafts)), 5),
    }
    for name, (html, _) in made.items():
        (folder / f"{name}.html").write_text(html)
    return {name: (folder / f"{name}.html", charts) for name, (_, charts) in made.items()}


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["full", "crowded", "comparison"])
def test_a_page_fits_and_shows_its_pictures(
    browser: Browser, pages: dict[str, tuple[Path, int]], tmp_path: Path, name: str, dark: bool, width: int
) -> None:
    file, charts = pages[name]
    browser.open(file, width=width, dark=dark)
    needed, room, window = browser.find(WIDTHS)
    assert needed <= room <= window == width  # no scrolling sideways
    found = browser.find(CHARTS)
    assert len(found) == charts
    for chart in found:
        assert 250 < chart["width"] <= 440 and chart["height"] > 90
        assert chart["smallest"] >= 10.5  # pixels
        assert chart["cut"] == chart["overlapping"] == []
    assert browser.complaints == []
    assert file.stat().st_size <= MOST_BYTES
    browser.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000


def test_a_fault_in_a_page_is_seen(browser: Browser, tmp_path: Path) -> None:
    """The control of the test above."""
    file = tmp_path / "bad.html"
    file.write_text("<p style='width:2000px'>wide</p><img src=http://127.0.0.1:9/x.png><script>throw 1</script>")
    browser.open(file, width=390)
    needed, room, _ = browser.find(WIDTHS)
    assert needed > room
    assert any("Uncaught" in text for text in browser.complaints)
    assert any(text.startswith("fetches http") for text in browser.complaints)


def test_charts_follow_dark_and_light(browser: Browser, pages: dict[str, tuple[Path, int]]) -> None:
    seen = []
    for dark in (False, True):
        browser.open(pages["full"][0], width=1280, dark=dark)
        seen.append(browser.find(CHARTS)[:6])
    for bright, dim in zip(*seen, strict=True):
        assert {"rgb(11, 107, 99)", "rgb(93, 96, 104)"} <= set(bright["colours"])  # the first series; ticks
        assert {"rgb(85, 199, 184)", "rgb(159, 163, 171)"} <= set(dim["colours"])
        # What is no colour of either theme is black: the default of a path that has no stroke or no fill.
        assert set(bright["colours"]) & set(dim["colours"]) <= {"none", "rgb(0, 0, 0)"}


def test_a_page_prints_in_the_light_theme_on_whole_sheets(browser: Browser, pages: dict[str, tuple[Path, int]]) -> None:
    browser.open(pages["full"][0], width=718, dark=True, media="print")  # A4 less its margins, at 96 dots an inch
    assert browser.find("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    needed, room, _ = browser.find(WIDTHS)
    assert needed <= room
    assert browser.pdf().startswith(b"%PDF")
