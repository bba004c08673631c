"""Options as users write them: mypy accepts the right ones and finds the wrong ones.

It is checked by `mypy` with the package, and with the installed package by `test_types.py`: a
`type: ignore` that nothing needs is an error, too.
"""

from __future__ import annotations

from typing import Any

from celery_redlock import CallOptions, LockOptions, SingletonTask, locked


@locked(
    "order:<order_id>",
    ttl=30,
    wait=0.5,
    on_conflict="retry",
    limit=2,
    max_lifetime=None,
    progress_timeout=5,
)
def charge(order_id: int) -> str:
    return f"charged {order_id}"


@locked(
    ["src"],
    scope="until_executed",
    reserve_ttl=60.0,
    on_duplicate="raise",
    scope_name="bank",
    retry_deadline=3,
)
def move(src: int, dst: int) -> None: ...


@locked(key=lambda src, dst: [f"a:{src}", f"a:{dst}"], fencing=False, on_lost=print)
def swap(src: int, dst: int) -> None: ...


@locked("r", on_conflict=lambda holder, request: "skip" if holder else "retry", on_deadline="skip")
def ask() -> None: ...


SHARED: LockOptions = {"ttl": 5.0, "on_unavailable": "run", "hold_for": 1}


@locked("s", **SHARED)
def shared() -> None: ...


class Base(SingletonTask):
    abstract = True
    lock_key = ("account:<src>", "account:<dst>")
    lock_ttl = 5
    lock_on_conflict = "skip"
    lock_max_lifetime = None
    lock_scope = "while_executing"


class Function(SingletonTask):
    lock_on_lost = "log"

    @staticmethod
    def lock_key(src: int, dst: int) -> str:
        return f"a:{src}"

    @staticmethod
    def lock_on_conflict(holder: Any, request: Any) -> str:
        return "skip"


ONCE: CallOptions = {"scope": "until_executed", "reserve_ttl": 60.0}


def publish(task: Function) -> None:
    task.apply_async((1, 2), lock={"scope": "until_executed", "on_duplicate": "skip"})
    task.apply_async((1, 2), lock=ONCE, countdown=5.0, queue="slow")
    task.apply_async((1, 2), lock={"on_duplicate": "wait"})  # type: ignore[typeddict-item]
    task.apply_async((1, 2), lock={"ttl": 5.0})  # type: ignore[typeddict-unknown-key]
    task.apply_async((1, 2), countdown="soon")  # type: ignore[arg-type]
    task.apply_async((1, 2), lokc=ONCE)  # type: ignore[call-arg]


name: str = charge(1)

locked("tenant:<tenant>", "all", limit=(3, 20))
locked("tenant:<tenant>", limit=lambda tenant, **_: (len(tenant), 20))
locked("mistyped limit", limit="3")  # type: ignore[arg-type]
locked("misspelt", tll=5.0)  # type: ignore[call-arg]
locked("mistyped", ttl="5")  # type: ignore[arg-type]
locked("no such policy", on_conflict="wate")  # type: ignore[arg-type]
locked("of the wrong option", on_duplicate="wait")  # type: ignore[arg-type]
locked("no function", on_lost=5)  # type: ignore[arg-type]
locked(3)  # type: ignore[arg-type]
charge("one")  # type: ignore[arg-type]


class Mistyped(SingletonTask):
    lock_ttl = "5"  # type: ignore[assignment]
    lock_scope = "until_done"  # type: ignore[assignment]
    lock_on_lost = None  # type: ignore[assignment]
