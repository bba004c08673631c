"""The recipes are short, begin with code, and each is run by a test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "recipes"
RECIPES = sorted(page for page in PAGES.glob("*.md") if page.stem != "index")
TESTS = "\n".join(
    path.read_text("utf-8") for path in (ROOT / "tests/tools/examples").glob("test_recipes*.py")
)


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_every_recipe_is_run_by_a_test(page: Path) -> None:
    assert re.search(rf'\b(?:running|code|blocks)\("{page.stem}"', TESTS), page.stem
