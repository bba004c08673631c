"""The bytes that a Redis node is sent."""

from __future__ import annotations

import pytest

from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.round import Round, Verb
from celery_redlock.stores.redis.requests import encode, request
from celery_redlock.stores.redis.scripts import RELEASE_DIGEST


@pytest.mark.parametrize("name", ["k", "größe", "k" * 300])
def test_acquire_and_release_from_templates_equal_the_general_encoding(name: str) -> None:
    claim, key = Claim(name, "token", 1.5, 1), f"p:{name}".encode()
    acquired, released = (
        encode(Round(verb, [claim], 0.0, 1.0), "p:") for verb in (Verb.ACQUIRE, Verb.RELEASE)
    )
    assert acquired == request(b"SET", key, b"token", b"NX", b"GET", b"PX", b"1500")
    assert released == request(b"EVALSHA", RELEASE_DIGEST, b"1", key, b"token")


@pytest.mark.parametrize("verb", [Verb.ACQUIRE, Verb.RELEASE])
def test_request_contains_the_key_and_not_the_displayed_resource(verb: Verb) -> None:
    claim = Claim("k#slot2", "token", 1.0, 1)
    claim.resource = "k"  # as of a slot of a limit
    assert b"\r\np:k#slot2\r\n" in encode(Round(verb, [claim], 0.0, 1.0), "p:")
