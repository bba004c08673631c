"""Pausing keys on the page: behind the same door as freeing a lock."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from werkzeug.test import Client, TestResponse

from celery_redlock import Redlock
from celery_redlock.locking import pauses
from tests.tools.web.conftest import proof, sign_in


def send(client: Client, word: str | None = None, **form: str) -> TestResponse:
    """Send the form of a browser when an operator presses a button."""
    data = {"proof": proof(client.get("/pauses")) if word is None else word, **form}
    return client.post("/pauses", data=data, headers={"Origin": "http://localhost"})


PAUSE = {"do": "pause", "pattern": "order:*", "seconds": "900", "reason": "<b>bad"}


def test_operator_pauses_and_resumes_on_the_page(
    client: Client, redlock: Redlock, caplog: pytest.LogCaptureFixture
) -> None:
    assert client.get("/pauses").status_code == 303
    sign_in(client)
    assert "Nothing is paused" in client.get("/pauses").text
    with caplog.at_level(logging.WARNING, "celery_redlock.web"):
        answer = send(client, **PAUSE)
    assert answer.status_code == 200 and "order:* is paused by" in answer.text
    assert "<b>bad" not in answer.text and "&lt;b&gt;bad" in answer.text
    assert "order:* is paused by" in caplog.text and "<b>bad in the web dashboard" in caplog.text
    ((pause,), _) = pauses.in_force(redlock)
    assert 890 < pause.ends_in <= 900 and pause.who == "an unknown address"
    page = client.get("/lock?resource=a*b").text
    assert "/pauses?resource=a%2Ab" in page or "/pauses?resource=a*b" in page
    assert 'value="a\\*b"' in client.get("/pauses?resource=a*b").text
    assert "is paused</strong>" in client.get("/lock?resource=order:7").text
    assert client.get("/lock.json?resource=order:7").json["pauses"][0]["pattern"] == "order:*"
    assert client.get("/lock.json?resource=mail:7").json["pauses"] == []
    answer = send(client, do="resume", pattern="order:*")
    assert answer.status_code == 200 and "order:* was resumed" in answer.text
    assert pauses.in_force(redlock) == ((), True)


def test_pause_on_the_page_needs_a_session(client: Client, serve: Any, redlock: Redlock) -> None:
    assert send(client, "", **PAUSE).status_code == 403
    sign_in(client)
    assert send(client, "forged", **PAUSE).status_code == 403
    read_only = serve()
    assert read_only.get("/pauses").status_code == 403
    assert send(read_only, "", **PAUSE).status_code == 403
    assert pauses.in_force(redlock) == ((), True)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"pattern": ""}, "1 to 512 characters"),
        ({"seconds": "x"}, "lasts 1 second to 7 days"),
        ({"seconds": "1e9"}, "lasts 1 second to 7 days"),
        ({"reason": "x" * 201}, "at most 200 characters"),
    ],
)
def test_invalid_pause_on_the_page_is_refused(
    client: Client, redlock: Redlock, changed: dict[str, str], said: str
) -> None:
    sign_in(client)
    answer = send(client, **{**PAUSE, **changed})
    assert answer.status_code == 400 and said in answer.text
    assert pauses.in_force(redlock) == ((), True)
