"""Two tasks with one key: they take turns, and neither is a duplicate of the other."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.delivering import RESERVED, Ran, deliver, header, take, token_of

SCOPES = ("until_executing", "until_executed", "until_and_while_executing", "until_expired")


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("had_one", [False, True])
def test_reservation_of_another_task_with_the_same_key_skips_no_message(
    ran: Ran, scope: str, had_one: bool
) -> None:
    """Its own message came without a reservation, or with one that has expired since."""
    task = ran.task(scope)
    take(ran.redlock, "another-id", task="shop.another")
    theirs = ran.redlock.tokens(RESERVED)
    given: Any = header(scope, **({"token": token_of()} if had_one else {}))
    assert deliver(task, 1, redlock_reservation=given)[0] == "done"
    assert ran.redlock.tokens(RESERVED) == theirs


@pytest.mark.parametrize("scope", SCOPES)
def test_message_of_the_same_task_with_a_reserved_key_is_a_duplicate(ran: Ran, scope: str) -> None:
    task = ran.task(scope)
    take(ran.redlock, "another-id", task=task.name)
    assert deliver(task, 1, redlock_reservation=header(scope))[0] != "done"
