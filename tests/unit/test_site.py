"""What looks at the links of the built site finds each kind of broken one, and no other."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "check_site.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("check_site", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "picture.svg").write_text("<svg/>")
    (tmp_path / "code" / "beat.py.html").write_text('<a id="L1" href="../index.html#top">up</a>')
    (tmp_path / "index.html").write_text("<p>replaced by each test</p>")
    return tmp_path


@pytest.mark.parametrize(
    "link",
    [
        "#top",
        "code/beat.py.html",
        "code/beat.py.html#L1",
        "picture.svg",
        "code/../index.html?q=1",
        "https://example.org/a?b#c",
        "mailto:a@example.org",
    ],
)
def test_a_link_that_leads_somewhere_is_right(script: Any, site: Path, link: str) -> None:
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
def test_a_broken_link_is_named_with_its_page(
    script: Any, site: Path, html: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (site / "index.html").write_text(html)
    assert script.main([str(site)]) == 1
    said = capsys.readouterr().err
    assert why in said and ("index.html: " in said or "beat.py.html: " in said)


def test_a_site_without_pages_is_no_site(script: Any, tmp_path: Path) -> None:
    assert script.main([str(tmp_path)]) == 1
    assert script.main([]) == 2


def test_sphinx_is_told_to_be_strict_and_the_check_is_part_of_it() -> None:
    makefile = (SCRIPT.parents[1] / "Makefile").read_text("utf-8")
    recipe = makefile.partition("\ndocs:\n")[2].partition("\n\n")[0]
    assert " -n -W --keep-going " in recipe and "check_site.py out/docs" in recipe
    assert "\nmake docs\n" in (SCRIPT.parents[1] / ".ci" / "run").read_text("utf-8")
