"""The recipes are short, begin with code, and each is run by a test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "recipes"
RECIPES = sorted(page for page in PAGES.glob("*.md") if page.stem != "index")
TESTS = "\n".join(
    path.read_text("utf-8") for path in (ROOT / "tests" / "examples").glob("test_recipes*.py")
)


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_recipe_begins_with_code_and_has_100_to_300_words(page: Path) -> None:
    text = page.read_text("utf-8")
    title, _, rest = text.partition("\n\n")
    prose = re.sub(r"^```.*?^```$", "", rest, flags=re.M | re.S)
    assert title.startswith("# ") and "\n#" not in prose
    assert len(rest.partition("```")[0].split()) <= 3, "there is prose before the code"
    assert 100 <= len(prose.split()) <= 300


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_every_recipe_is_run_by_a_test(page: Path) -> None:
    assert re.search(rf'\b(?:running|code|blocks)\("{page.stem}"', TESTS), page.stem


def test_recipe_index_promises_a_test_of_each() -> None:
    assert "Each is run by a test" in (PAGES / "index.md").read_text("utf-8")
    assert len(RECIPES) > 16
