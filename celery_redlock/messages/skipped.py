"""The result of a task that was skipped."""

from __future__ import annotations

from typing import Any

__all__ = ["Skipped"]


class Skipped(dict[str, Any]):
    """The result of a task that was skipped because another held its lock. A dict, to be stored.

    `Skipped.of(result)` recognizes it in a result that went through a backend.
    """

    __module__ = "celery_redlock"

    def __init__(self, resource: str, holder: str) -> None:
        super().__init__(celery_redlock="skipped", resource=resource, holder=holder)

    @classmethod
    def of(cls, result: object) -> Skipped | None:
        """Return `result` as a `Skipped` if it is one; else None."""
        if isinstance(result, dict) and result.get("celery_redlock") == "skipped":
            resource, holder = result.get("resource"), result.get("holder")
            return cls(*(one if isinstance(one, str) else "" for one in (resource, holder)))
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self["resource"], self["holder"])
