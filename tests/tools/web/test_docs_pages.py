"""The site of the docs, built and opened: on a desk and on a phone; its Markdown, its llms.txt."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tools.web.browser import DESK, PHONE, look

DOCS = Path(__file__).parents[3] / "docs"
NEEDED = ("sphinx", "furo", "myst_parser", "sphinx_click", "sphinx_copybutton")
WANTING = [name for name in NEEDED if importlib.util.find_spec(name) is None]

if WANTING:
    why = f"the group docs is not installed, as no {', '.join(WANTING)}: run make docs"
    pytest.skip(why, allow_module_level=True)

PAGES = (
    "index",
    "settings",
    "python",
    "policies",
    "start",
    "hot-keys",
    "guarantees",
    "runbook",
    "glossary",
)
"""Pages that are opened, as on the site: a folder's are `folder/name`."""

WIDER = """
const beyond = [...document.querySelectorAll("article *")].filter(one =>
  one.getBoundingClientRect().right > arguments[0] + 1
  && !one.closest("pre, .table-wrapper, p:has(img)"));
return [document.documentElement.scrollWidth,
  beyond.map(one => one.tagName + ": " + one.textContent.slice(0, 60))];
"""
"""The width of the page, and its elements that leave the window outside of any scrolling box."""
SCROLLED = """
return [...document.querySelectorAll(".table-wrapper")]
  .filter(one => one.scrollWidth > one.clientWidth).map(one => one.textContent.slice(0, 60));
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build these pages only: `make docs` builds all, refuses warnings and checks every link."""
    place = tmp_path_factory.mktemp("site")
    pages = ",".join(f"{name}.md" for name in (*PAGES, "beat"))
    command = [sys.executable, "-m", "sphinx", "-q", "-E", "-b", "html", "-d", f"{place}/doctrees"]
    done = subprocess.run(
        [*command, "-D", f"include_patterns={pages}", str(DOCS), f"{place}/html"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return place / "html"


@pytest.mark.parametrize("page", PAGES)
def test_page_of_the_docs_is_no_wider_than_the_window(chromium: Any, site: Path, page: str) -> None:
    chromium.get((site / f"{page}.html").as_uri())
    for size in (DESK, PHONE):
        look(chromium, size=size)
        width, beyond = chromium.execute_script(WIDER, size[0])
        assert (width <= size[0], beyond) == (True, []), f"{page}: {width} of {size[0]} px"


def test_table_of_the_settings_page_is_not_scrolled_on_a_desk(chromium: Any, site: Path) -> None:
    look(chromium, size=DESK)
    chromium.get((site / "settings.html").as_uri())
    assert chromium.find_elements("css selector", "#redlock_ttl")
    assert chromium.execute_script(SCROLLED) == []


def test_page_of_the_docs_exists_as_markdown_and_on_the_map(site: Path) -> None:
    settings = (site / "settings.md").read_text("utf-8")
    assert settings.startswith("# Settings\n") and "### `redlock_ttl`\n" in settings
    assert "toctree" not in (site / "index.md").read_text("utf-8")
    assert "](code/examples/beat.py.html)" in (site / "beat.md").read_text("utf-8")
    assert "from celery import Celery" in re.sub(
        r"<.*?>", "", (site / "code" / "examples" / "beat.py.html").read_text("utf-8")
    )
    assert 'type="text/markdown" href="settings.md"' in (site / "settings.html").read_text("utf-8")
    told = (site / "llms.txt").read_text("utf-8")
    assert told.startswith("# celery_redlock\n\n> Celery tasks that must not run twice at once. ")
    assert "\n\n## Reference\n\n- [Settings](settings.md): every option" in told
