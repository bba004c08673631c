"""A receiver of all signals, for the workers' app: it writes them into the bodies' log."""

from __future__ import annotations

from typing import Any

from celery_redlock.messages import signals
from celery_redlock.protocol.values import Owner
from tests.support.bodies import note

__all__ = ["connect"]


def connect() -> None:
    """Receive all signals from now on, in this process and those forked from it."""
    for name in signals.__all__:
        getattr(signals, name).connect(_hear, weak=False)


def _hear(
    sender: Any = None, signal: Any = None, resource: str = "", lease: Any = None, **more: Any
) -> None:
    told = dict(more)
    if lease is not None:
        told["owner"] = _owner(Owner.of(lease.token))
        told["left"] = lease.remaining()
    if "holder" in told:
        told["holder"] = _owner(getattr(told["holder"], "owner", told["holder"]))
    if "votes" in told:
        told["votes"] = [vote.vote.value for vote in told["votes"]]
    if "loss" in told:
        loss = told.pop("loss")
        told = {"reason": loss.reason, "owner": _owner(loss.owner), "held_for": loss.held_for}
    note(signal.name, resource, sender.name if sender is not None else None, told)


def _owner(owner: Owner | None) -> list[Any] | None:
    return [owner.task_id, owner.task, owner.pid] if owner is not None else None
