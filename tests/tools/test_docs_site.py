"""The site of the docs: its pictures are those of the script.

The check of links finds broken ones.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> Any:
    return load("check_site")


PICTURES = [draw() for draw in load("make_pictures").PICTURES]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "picture.svg").write_text("<svg/>")
    (tmp_path / "code" / "beat.py.html").write_text('<a id="L1" href="../index.html#top">up</a>')
    (tmp_path / "index.html").write_text("<p>replaced by each test</p>")
    return tmp_path


@pytest.mark.parametrize(
    "link",
    ["#top", "code/beat.py.html", "code/beat.py.html#L1", "picture.svg", "code/../index.html?q=1",
     "https://example.org/a?b#c", "mailto:a@example.org"],
)  # fmt: skip
def test_link_that_leads_somewhere_passes_the_check_of_the_site(
    script: Any, site: Path, link: str
) -> None:
    (site / "index.html").write_text(f'<h1 id="top">x</h1><a href="{link}">x</a>')
    assert script.check(site) == ([], 2)


@pytest.mark.parametrize(
    ("html", "why"),
    [
        ('<h1 id="top"></h1><a href="gone.html">x</a>', "leads nowhere"),
        ('<h1 id="top"></h1><a href="#gone">x</a>', "there is no #gone there"),
        ('<h1 id="top"></h1><a href="code/beat.py.html#L2">x</a>', "there is no #L2 there"),
        ('<h1 id="top"></h1><img src="gone.svg">', "leads nowhere"),
        ('<h1 id="top"></h1><a href="../secret.html">x</a>', "leaves the site"),
        ('<h1 id="top"></h1><a href="https:///a">x</a>', "is not a web address"),
        ('<h1 id="top"></h1><a href="ftp://example.org/a">x</a>', "is not a web address"),
        ('<h1 id="top"></h1><a href="https://example.org:a/">x</a>', "is not an address"),
        ("<p>the other page's link has lost its anchor</p>", "there is no #top there"),
    ],
)
def test_broken_link_of_the_site_is_named_with_its_page(
    script: Any, site: Path, html: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (site / "index.html").write_text(html)
    assert script.main([str(site)]) == 1
    said = capsys.readouterr().err
    assert why in said and ("index.html: " in said or "beat.py.html: " in said)


def test_site_without_pages_fails_its_check(script: Any, tmp_path: Path) -> None:
    assert script.main([str(tmp_path)]) == 1
    assert script.main([]) == 2


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_committed_picture_is_the_one_that_the_script_draws(picture: Any) -> None:
    committed = (DOCS / "pictures" / f"{picture.name}.svg").read_text("utf-8")
    assert committed == picture.svg(), "run: python docs/make_pictures.py"


def test_every_picture_is_shown_with_a_text_alternative() -> None:
    files = {file.stem for file in (DOCS / "pictures").glob("*.svg")}
    assert files == {"demo", *(picture.name for picture in PICTURES)}  # one is the demo's own
    names = ("../README.md", "index.md", "how-it-works.md", "architecture.md")
    pages = "\n".join((DOCS / page).read_text("utf-8") for page in names)
    shown = re.findall(r"^!\[(.{80,})\]\((?:docs/)?pictures/([\w-]+)\.svg\)$", pages, re.M)
    assert {name for _, name in shown} == files


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """A site of two pages, with their Markdown and the map."""
    for name in ("index", "a"):
        (tmp_path / f"{name}.html").write_text("<p>")
    (tmp_path / "index.md").write_text("# Site\n\n[A](a.md#x)\n\n```\n[no](link.md)\n```\n")
    (tmp_path / "a.md").write_text("# A\n")
    (tmp_path / "llms.txt").write_text("# Site\n\n> Of two.\n\n## All\n\n- [A](a.md): the first\n")
    return tmp_path


def test_site_with_its_markdown_and_map_passes_the_check(script: Any, told: Path) -> None:
    assert script.check_markdown(told) == []


@pytest.mark.parametrize(
    ("file", "text", "wrong"),
    [
        ("a.md", None, "a.md is missing: the Markdown of a page"),
        ("llms.txt", None, "llms.txt is missing"),
        ("llms.txt", "# Site\n", "llms.txt does not list a.md"),
        ("a.md", "[b](b.md)", "a.md: 'b.md' leads nowhere"),
        ("b.html", "<p>", "b.md is missing: the Markdown of a page"),
    ],
)
def test_missing_markdown_or_map_of_the_site_is_named(
    script: Any, told: Path, file: str, text: str | None, wrong: str
) -> None:
    if text is None:
        (told / file).unlink()
    else:
        (told / file).write_text(text)
    assert wrong in script.check_markdown(told)
