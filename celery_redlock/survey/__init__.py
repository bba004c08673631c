"""Looks at the nodes from outside: who holds what, and frees it by force."""

from __future__ import annotations

from .models import KINDS, Entry, NodeLook, Rival, Survey
from .snapshot import look, survey

__all__ = ["KINDS", "Entry", "NodeLook", "Rival", "Survey", "look", "survey"]
