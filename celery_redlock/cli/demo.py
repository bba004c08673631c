"""`redlock demo`: the demonstration."""

from __future__ import annotations

from ..demo.__main__ import command

__all__ = ["command"]
