"""An entry point as an installed package has it, for as long as a test needs it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from celery_redlock.stores import kinds

__all__ = ["published"]


@contextlib.contextmanager
def published(
    scheme: str, value: str, directory: Path, package: str = "own_store"
) -> Iterator[None]:
    """Install a package in `directory` that publishes a kind of store."""
    metadata = directory / f"{package}-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[{kinds.GROUP}]\n{scheme} = {value}\n")
    sys.path.append(str(directory))
    kinds._published.pop(scheme, None)
    try:
        yield
    finally:
        sys.path.remove(str(directory))
        kinds._published.pop(scheme, None)
