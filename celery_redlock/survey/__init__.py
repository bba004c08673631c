"""Survey of the nodes from outside, and release by force."""

from __future__ import annotations

from .models import KINDS, Entry, NodeLook, Rival, Survey
from .snapshot import look, survey

__all__ = ["KINDS", "Entry", "NodeLook", "Rival", "Survey", "look", "survey"]
