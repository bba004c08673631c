"""Errors of failed tasks as they are read from a result backend, by each serializer."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from celery import Celery, states
from celery.utils import uuid

import celery_redlock
from celery_redlock import (
    ConfigurationError,
    DuplicateTask,
    LeaseLost,
    NotAcquired,
    QuorumUnavailable,
    RedlockError,
    ResourceHeld,
)
from celery_redlock.compat.once import AlreadyQueued
from celery_redlock.compat.singleton import DuplicateTaskError
from celery_redlock.protocol.lease import Lease
from celery_redlock.protocol.values import Holder, NodeVote, Owner, Vote
from tests.support.clock import FakeClock

VOTES = (NodeVote("10.0.0.1:6379", Vote.NO, "held"),)
HOLDER = Holder("a", Owner("host", 7, "id", task="t"), 1, 1, 3.0, "abc")
ERRORS: list[RedlockError] = [
    RedlockError("plain", resource="a"),
    ConfigurationError("wrong", resource="a"),
    NotAcquired("no", resource="a", votes=VOTES),
    ResourceHeld("held", resource="a", votes=VOTES, holder=HOLDER, conflicting=("a", "b")),
    QuorumUnavailable("away", resource="a", votes=VOTES, retry_after=3.0),
    DuplicateTask("again", "the-id", resource="a"),
    DuplicateTaskError("again", "the-id"),
    AlreadyQueued(3.5, "the-id", resource="a"),
    LeaseLost("refused", resource="a", reason="refused", task="t", held_for=3.0, votes=VOTES),
]


def read_back(error: RedlockError, serializer: str) -> Any:
    """Return the error as a client reads it that a worker stores."""
    app = Celery("travel", backend="cache+memory://", set_as_current=False)
    app.conf.update(result_serializer=serializer, result_accept_content=[serializer])
    task_id = uuid()  # all apps of a process share this backend
    app.backend.store_result(task_id, error, states.FAILURE)
    return app.backend.get_result(task_id)


@pytest.mark.parametrize("serializer", ["json", "pickle", "yaml"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_error_read_from_a_backend_says_what_was_stored_or_nothing(
    error: RedlockError, serializer: str
) -> None:
    read = read_back(error, serializer)
    assert type(read) is type(error) and str(read) == str(error)
    annotated = [getattr(kind, "__annotations__", {}) for kind in type(error).__mro__]
    for name in {name for names in annotated for name in names}:
        sent, got = getattr(error, name), getattr(read, name)
        assert got == sent or (serializer != "pickle" and got in (None, ())), name
    for name in {"task_id", "countdown"} & vars(error).keys():
        assert getattr(read, name) == getattr(error, name)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_error_pickled_twice_stays_the_same(error: RedlockError) -> None:
    """A pool child pickles it for its parent, and a backend once more."""
    twice = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(error))))
    assert str(twice) == str(error)
    assert vars(twice) == {
        **({"lease": None} if isinstance(error, LeaseLost) else {}),
        **vars(error),
    }


def test_every_public_error_is_read_back() -> None:
    public = {getattr(celery_redlock, name) for name in celery_redlock.__all__}
    errors = {one for one in public if isinstance(one, type) and issubclass(one, Exception)}
    assert errors <= {type(error) for error in ERRORS}


def test_a_pickled_loss_shows_no_token() -> None:
    lease = Lease("r", "secret", 10.0, 109.0, FakeClock())
    told = {"resource": "r", "lease": lease, "held_for": 2.0, "owner": Owner("h", 1)}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        pickled = pickle.dumps(LeaseLost("r: over", **told), protocol)
        assert b"secret" not in pickled
        loss = pickle.loads(pickled)
        found = loss.lease.token, loss.lease.ttl, loss.resource, loss.held_for, str(loss)
        assert found == ("", 10.0, "r", 2.0, "r: over")
    with pytest.raises(TypeError, match="no attribute 'holder'"):
        LeaseLost("r: over", holder=None)
