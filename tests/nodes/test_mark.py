"""A release that leaves a mark: in one step with it, on every node; see test_verbs.py."""

from __future__ import annotations

from typing import Any

import pytest

from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.names import slots
from celery_redlock.protocol.replies import DONE
from celery_redlock.protocol.round import Verb
from tests.support.subjects import Real, Subject, claim

MARK = "the-id:0:0123456789abcdef#done"


def marked(resource: Any = "r", token: str = "mine") -> Claim:
    new = claim(token, resource)
    new.mark = (MARK, 60.0)
    return new


def mark(node: Subject) -> Any:
    return node.ask(Verb.PEEK, claim("x", MARK))


@pytest.mark.parametrize("resource", ["r", ("a", "b"), slots("r", 3)[2]], ids=repr)
def test_release_leaves_its_mark_and_frees_the_key(node: Subject, resource: Any) -> None:
    node.ask(Verb.ACQUIRE, claim("mine", resource))
    assert mark(node) is None
    assert node.ask(Verb.RELEASE, marked(resource)) is True
    token, left = mark(node)
    assert token == DONE
    assert 59.0 < left <= 60.0
    assert node.ask(Verb.PEEK, claim("x", resource)) is None
    # A plain release after one that was marked, on a connection that has seen no other.
    node.ask(Verb.ACQUIRE, claim("mine", resource))
    assert node.ask(Verb.RELEASE, claim("mine", resource)) is True


def test_mark_is_set_though_the_lock_is_lost(node: Subject) -> None:
    """The work is done all the same, and the lock of another is not released."""
    node.ask(Verb.ACQUIRE, claim("theirs"))
    assert node.ask(Verb.RELEASE, marked()) is False
    assert mark(node)[0] == DONE
    assert node.ask(Verb.PEEK, claim("x"))[0] == "theirs"


def test_undo_sets_no_mark(node: Subject) -> None:
    node.ask(Verb.ACQUIRE, claim("mine"))
    assert node.ask(Verb.UNDO, marked()) is True
    assert mark(node) is None


def test_mark_and_release_are_written_in_one_request(valkey: Real, debian: Real) -> None:
    """The mark comes first, so each client that finds the release finds the mark.

    A connection that breaks between them sends both again.
    """
    for real in (valkey, debian):
        real.flush()
        real.ask(Verb.ACQUIRE, claim("mine"))
        with real.admin.monitor() as monitor:
            real.ask(Verb.RELEASE, marked())
            said: list[str] = []
            for line in monitor.listen():
                said.append(line["command"])
                if said[-1].upper().startswith("ZPOPMIN"):
                    break
    assert said[0].upper().startswith("EVAL")
    words = [words.split(" ")[0].upper() for words in said[1:]]
    assert words == ["SET", "GET", "DEL", "ZPOPMIN"]
    assert MARK in said[1]


def test_full_node_frees_the_lock_without_its_mark(debian: Real) -> None:
    debian.flush()
    debian.ask(Verb.ACQUIRE, claim("mine"))
    debian.admin.config_set("maxmemory", 1)
    try:
        assert debian.ask(Verb.RELEASE, marked()) is True
        assert mark(debian) is None
    finally:
        debian.admin.config_set("maxmemory", 0)
    assert debian.ask(Verb.PEEK, claim("x")) is None
