"""The options of `@locked` for editors and type checkers. No program loads this module."""

from __future__ import annotations

from typing import TypedDict

from .checks import OnDuplicate, Scope
from .options import Key, LimitOption, OnConflict, OnDeadline, OnLost, OnUnavailable

__all__ = ["LockOptions"]


class LockOptions(TypedDict, total=False):
    """The options of `@locked`; `TASK` has all the rest."""

    key: Key
    ttl: float
    wait: float
    retry_backoff: float
    retry_backoff_max: float
    retry_deadline: float | None
    max_lifetime: float | None
    fencing: bool
    scope_name: str | None
    limit: LimitOption
    shared: bool
    rate: str | None
    burst: int | None
    scope: Scope
    reserve_ttl: float | None
    on_duplicate: OnDuplicate
    hold_for: float
    on_conflict: OnConflict
    on_deadline: OnDeadline
    on_unavailable: OnUnavailable
    on_lost: OnLost
    progress_timeout: float | None
