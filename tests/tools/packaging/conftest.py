"""The sdist, the wheel made of it, and environments into which it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]


def run(
    *command: str | Path, cwd: Path | None = None, check: bool = True, **environment: str
) -> str:
    """Run a program as a user would: nothing of this project is on its path, warnings are shown."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**clean, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert not check or done.returncode == 0, (
        f"{command} ended with {done.returncode}: {done.stdout}"
    )
    return done.stdout


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the sdist, and the wheel that was built from it and not from the tree.

    With the build backend of the group `test`: no index is asked.
    """
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    return out


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


def closure(name: str) -> set[str]:
    """A distribution and all that it needs here, without extras."""
    found: set[str] = set()
    todo = [Requirement(name)]
    while todo:
        requirement = todo.pop()
        if requirement.name in found:
            continue
        found.add(requirement.name)
        for line in metadata.requires(requirement.name) or []:
            needed = Requirement(line)
            extras = {"", *requirement.extras}
            if needed.marker is None or any(
                needed.marker.evaluate({"extra": extra}) for extra in extras
            ):
                todo.append(needed)
    return found


@pytest.fixture(scope="session")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel and what it asks for; no extra, not our source.

    Its dependencies are links to those that are installed here: that takes no index and no time.
    pip refuses to install it if one is missing.
    """
    pytest.importorskip("pip", reason="the rows of `make matrix` have no pip")
    home = tmp_path_factory.mktemp("base")
    venv.create(home, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    for name in closure("celery-redlock") - {"celery-redlock"}:
        for file in metadata.files(name) or []:
            top = file.parts[0]
            link = site / top
            if top not in ("..", "__pycache__", "bin") and not link.exists():
                link.symlink_to(Path(str(file.locate())).parents[len(file.parts) - 1] / top)
    python = home / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "-q", "--no-index", "--no-compile", wheel, cwd=home)
    return python
