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
