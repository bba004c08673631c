"""The types of the options of `@locked` and `apply_async`, for editors and type checkers.

A program loads this module only if it imports one of these types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from .checks import OnDuplicate, Scope
from .options import Key, LimitOption, OnConflict, OnDeadline, OnLost, OnUnavailable

if TYPE_CHECKING:
    from datetime import datetime

    import kombu
    from celery.canvas import Signature

__all__ = ["CallOptions", "LockOptions", "PublishOptions"]


class CallOptions(TypedDict, total=False):
    """Options of one call: `apply_async(..., lock={...})`."""

    scope: Scope
    on_duplicate: OnDuplicate
    reserve_ttl: float | None


class PublishOptions(TypedDict, total=False):
    """The keywords of Celery's `apply_async`, in the types of celery-types, and ours."""

    lock: CallOptions
    producer: kombu.Producer | None
    link: Signature[Any] | list[Signature[Any]] | None
    link_error: Signature[Any] | list[Signature[Any]] | None
    shadow: str | None
    countdown: float
    eta: datetime
    expires: float | datetime
    retry: bool
    retry_policy: Mapping[str, Any]
    queue: str | kombu.Queue
    exchange: str | kombu.Exchange
    routing_key: str
    priority: int
    serializer: str
    compression: str
    add_to_parent: bool
    publisher: kombu.Producer
    headers: dict[str, str]
    ignore_result: bool
    time_limit: int
    soft_time_limit: int


class LockOptions(TypedDict, total=False):
    """The options of `@locked`, which `docs/settings.md` explains.

    Several tasks can share them::

        SLOW: LockOptions = {"ttl": 60.0, "on_conflict": "skip"}

        @locked("report:<day>", **SLOW)
        def report(day: str) -> None: ...
    """

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
