"""An interpreter with packages of its own for each peer, kept in `.bench/` between runs.

redlock-py and redlock-ng both install a package called `redlock`, and redlock-ng wants an older
redis-py than we do, so no two peers share an environment.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".bench"


class Unavailable(Exception):
    """A contestant cannot be measured here; the message says why."""


def python_with(requirement: str, *others: str) -> Path:
    """Return an interpreter that can import `requirement` ("name==version"), made on first use.

    Args:
        requirement: The package that names the environment.
        *others: What it forgets to ask for.

    Raises:
        Unavailable: pip could not install it.
    """
    home = CACHE / requirement.replace("==", "-")
    python = home / "bin" / "python"
    done = home / "installed"
    if not done.exists():
        CACHE.mkdir(exist_ok=True)
        (CACHE / ".gitignore").write_text("*\n")
        shutil.rmtree(home, ignore_errors=True)
        # This environment's pip installs into the new one: ensurepip is missing on Debian.
        venv.create(home, with_pip=False, symlinks=True)
        pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
        run = subprocess.run(
            [*pip, "install", "--quiet", requirement, *others], capture_output=True, text=True
        )
        if run.returncode:
            lines = [line for line in run.stderr.splitlines() if line.startswith("ERROR")]
            raise Unavailable(f"pip install {requirement}: {'; '.join(lines) or run.stderr[-300:]}")
        done.touch()
    return python
