"""A user's `mypy --strict` on the README's example, with the installed package."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

from tests.tools.packaging.conftest import ROOT, run

README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
(EXAMPLE,) = [block for block in BLOCKS if "redlock_nodes = " in block]
ANNOTATED = {
    'rebuild(report_id, lang="en"):': 'rebuild(report_id: int, lang: str = "en") -> str:',
    "charge(order_id, amount):": "charge(order_id: int, amount: int) -> str:",
}
"""Annotations that every user of --strict adds to functions."""

MORE = """
from celery_redlock import Redlock, Skipped

with Redlock(["redis://10.0.0.1:6379/0"]).lock("stock", wait=5.0) as lease:
    reveal_type(lease.fencing_token)

@locked("sum:<a>", limit=3)
def plain(a: int, b: int) -> int:
    return a + b

reveal_type(plain)
reveal_type(Skipped.of("x"))
plain("one", 2)
"""


@pytest.fixture
def check(base: Path, tmp_path: Path) -> Callable[[str], str]:
    """A user's project, in an environment of its own, and what mypy says of it."""

    def check(source: str) -> str:
        (tmp_path / "shop.py").write_text(source)
        return run(
            *(sys.executable, "-m", "mypy", "--strict", "--python-executable", base, "shop.py"),
            cwd=tmp_path,
            check=False,
        )

    return check


def annotated() -> str:
    source = EXAMPLE
    for before, after in ANNOTATED.items():
        assert source.count(before) == 1
        source = source.replace(before, after)
    return source


@pytest.fixture
def stubs(base: Path) -> Iterator[None]:
    """celery-types, for one test: the environment is that of all."""
    (site,) = base.parents[1].glob("lib/python*/site-packages")
    links = []
    for file in metadata.files("celery-types") or []:
        link = site / file.parts[0]
        if not link.exists():
            link.symlink_to(Path(str(file.locate())).parents[len(file.parts) - 1] / link.name)
            links.append(link)
    yield
    for link in links:
        link.unlink()


@pytest.mark.slow
@pytest.mark.usefixtures("stubs")
def test_users_project_passes_mypy_and_its_mistakes_are_found(check: Callable[[str], str]) -> None:
    """With celery-types, as in the docs."""
    said = check(annotated() + MORE)
    errors = [line for line in said.splitlines() if ": error:" in line]
    assert len(errors) == 1 and 'expected "int"' in errors[0], said
    assert re.findall(r'Revealed type is "([^"]+)"', said) == [
        "int | None",
        "def (a: int, b: int) -> int",
        "celery_redlock.messages.skipped.Skipped | None",
    ]


@pytest.mark.slow
def test_package_without_celery_types_lacks_no_types_of_ours(check: Callable[[str], str]) -> None:
    said = check(annotated() + MORE.replace('plain("one", 2)', ""))
    assert {line.split("[")[-1] for line in said.splitlines() if ": error:" in line} == {
        "import-untyped]",  # Celery ships no types
        "untyped-decorator]",  # @app.task
    }


@pytest.mark.slow
@pytest.mark.usefixtures("stubs")
def test_misspelt_or_mistyped_option_is_found_by_mypy(check: Callable[[str], str]) -> None:
    """Each wrong line of the example is marked: an unneeded mark would be an error as well."""
    assert "Success" in check(Path(__file__).with_name("typed_options.py").read_text("utf-8"))
