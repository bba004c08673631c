"""What one node of five can do through each key that is read besides locks: a liar, a node that
has forgotten everything, and a key that somebody has written there by hand.

Over fake nodes. docs/hostile.md has the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from celery_redlock import SingletonTask
from celery_redlock.protocol.names import mark_of
from celery_redlock.protocol.replies import DONE
from celery_redlock.protocol.values import Owner
from tests.support.delivering import deliver
from tests.support.fake_lock import FakeRedlock

AGAIN = {"delivery_info": {"redelivered": True}}
MARK = mark_of(Owner("here", 1, "the-id", task="t"), ["k"])
EVER = 10 * 365 * 86_400.0
FIRST = Owner("there", 1, task_id="the-id", task="t").token("0" * 32)


def write(redlock: FakeRedlock, name: str, value: str, seconds: float = EVER) -> None:
    """Write a key by hand on the last node."""
    redlock.fakes[4].held[name] = (value, redlock.clock() + seconds)


def lie(redlock: FakeRedlock, answers: Callable[[str, Any], Any]) -> None:
    """Have the last node answer as it likes: by the verb's word and the honest answer."""
    node = redlock.fakes[4]
    honest = node.execute

    def execute(verb: Any, claims: Sequence[Any], now: float) -> Any:
        return answers(verb.word, honest(verb, claims, now))

    node.execute = execute  # type: ignore[method-assign]


def says_held(token: str) -> Callable[[str, Any], Any]:
    """Answers of a node that says to every PEEK that this token is there, for years."""

    def answers(word: str, reply: Any) -> Any:
        if word != "peek":
            return reply
        return [(token, EVER)] * len(reply) if isinstance(reply, list) else (token, EVER)

    return answers


@pytest.fixture
def task(app: Any) -> Any:
    @app.task(base=SingletonTask, bind=True, name="t", lock_key="k", acks_late=True)
    def task(self: Any) -> str:
        return "ran"

    return task


@pytest.mark.parametrize("how", ["liar", "forged"])
def test_done_mark_of_one_node_takes_no_work(redlock: FakeRedlock, task: Any, how: str) -> None:
    if how == "liar":
        lie(redlock, says_held(DONE))
    else:
        write(redlock, MARK, DONE)
    assert deliver(task, **AGAIN)[0] == "ran"
