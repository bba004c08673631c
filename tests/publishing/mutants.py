"""Planted bugs, for this campaign to find: each was a bug of the library once.

Loaded by `project.py` and the beats' app alone, in processes of a campaign that was asked to.
"""

from __future__ import annotations

from tests.faults.mutants import Mutant


def plant(name: str) -> None:
    """Put a bug into the library, in this process and those forked from it."""
    MUTANTS[name].plant()


MUTANTS: dict[str, Mutant] = {}
