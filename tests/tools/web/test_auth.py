"""Access to the page: sign-in, release of locks, and the headers that restrict a browser."""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from werkzeug.test import Client, TestResponse

from celery_redlock import Redlock
from celery_redlock.protocol.errors import ConfigurationError
from celery_redlock.protocol.values import Owner, token_digest
from celery_redlock.survey.snapshot import look
from celery_redlock.web import make_app
from celery_redlock.web.wsgi import Page
from tests.support.names import Log, Patch
from tests.support.nodes import told_all
from tests.tools.web.conftest import SECRET, proof, sign_in

Serve = Callable[..., Client]
FROM = {"REMOTE_ADDR": "192.0.2.7"}
ASK = "/release?resource=order:1&kind=lock&slot=1&digest="


def digest(client: Client) -> str:
    return str(client.get("/lock.json?resource=order:1").json["entries"][0]["digest"])


def held(redlock: Redlock) -> bool:
    return redlock.holder("order:1") is not None


def confirm(client: Client, url: str, **more: Any) -> TestResponse:
    """Send the request of a browser when an operator confirms."""
    data = {"proof": proof(client.get(url))} | more.pop("data", {})
    headers = {"Origin": "http://localhost"} | more.pop("headers", {})
    return client.post(url, data=data, headers=headers, **more)


def test_operator_frees_the_lock_that_was_shown(
    client: Client, redlock: Redlock, holds: Any
) -> None:
    holds("order:1")
    url = ASK + digest(client)
    asked = client.get(url)
    assert asked.status_code == 302 or asked.status_code == 303
    assert urlsplit(asked.location).path == "/login"
    sign_in(client)
    shown = client.get(url).text
    assert "shop.tasks.pay" in shown and "worker-a" in shown and "does not stop its holder" in shown
    assert held(redlock), "nothing is freed by looking"
    answer = confirm(client, url)
    assert answer.status_code == 200 and "Freed" in answer.text
    assert not held(redlock)


def test_freed_lock_is_logged_on_one_line(client: Client, holds: Any, caplog: Log) -> None:
    holds("order:\x1b[2J\n1")
    name = "order:%1b%5B2J%0A1"
    sign_in(client)
    shown = client.get(f"/lock.json?resource={name}").json["entries"][0]["digest"]
    confirm(client, f"/release?resource={name}&kind=lock&slot=1&digest={shown}")
    (line,) = (r.getMessage() for r in caplog.records if "was freed on" in r.getMessage())
    assert line.isprintable() and r"order:\x1b[2J\n1" in line


@pytest.mark.parametrize(
    ("user", "named"),
    [
        (lambda environ: environ["HTTP_X_USER"], "nodes by ann at 192.0.2.7 in the"),
        (lambda environ: "\x1b[2J\nroot" + "x" * 500, r"\x1b[2J\nroot" + "x" * 191 + " at"),
        (lambda environ: None, "nodes by 192.0.2.7 in the"),
        (None, "nodes by 192.0.2.7 in the"),
    ],
)
def test_log_of_a_freed_lock_names_the_user_as_the_site_does(
    serve: Serve, holds: Any, caplog: Log, user: Any, named: str
) -> None:
    lease = holds("order:1")
    client = serve(token=SECRET, user=user)
    sign_in(client)
    confirm(client, ASK + digest(client), headers={"X-User": "ann"}, environ_base=FROM)
    (line,) = (r.getMessage() for r in caplog.records if "was freed on" in r.getMessage())
    assert named in line and line.startswith("redlock:order:1 was freed on 5 of 5 nodes")
    assert "shop.tasks.pay 6f1c2b, pid 4001 on worker-a had it" in line
    assert line.isprintable() and lease.token not in line and SECRET not in line


def test_user_who_cannot_be_named_frees_nothing(serve: Serve, redlock: Redlock, holds: Any) -> None:
    def user(environ: Any) -> str:
        raise LookupError("the session is of another site")

    holds("order:1")
    client = serve(token=SECRET, user=user)
    sign_in(client)
    url = ASK + digest(client)
    answer = confirm(client, url)
    assert answer.status_code == 500 and held(redlock)
    assert client.get(url).status_code == 200, "to look needs no name"


def test_lock_that_another_has_meanwhile_is_not_freed(
    client: Client, redlock: Redlock, holds: Any
) -> None:
    lease = holds("order:1")
    url = ASK + digest(client)
    sign_in(client)
    word = proof(client.get(url))
    redlock.release(lease)
    other = holds("order:1")
    answer = client.post(url, data={"proof": word})
    assert answer.status_code == 409 and "Somebody else has it now" in answer.text
    assert redlock.extend(other), "the other still holds it"
    redlock.release(other)
    answer = client.post(url, data={"proof": word})
    assert answer.status_code == 409 and "gone already" in answer.text


def test_reader_is_freed_by_its_token_though_an_older_one_has_ended(
    client: Client, redlock: Redlock
) -> None:
    leases = [redlock.acquire("order:1", shared=True, ttl=600) for _ in range(3)]
    told_all(redlock)
    first, second, third = (token_digest(lease.token) for lease in leases)
    assert f"reader {second}" in client.get("/lock?resource=order:1").text
    sign_in(client)
    redlock.release(leases[0])
    told_all(redlock)
    assert "gone already" in client.get(ASK + first).text
    answer = confirm(client, ASK.replace("slot=1", "slot=2") + second)
    assert "Freed" in answer.text and "already has" not in answer.text
    assert [entry.digest for entry in look(redlock, "order:1")] == [third]


def test_forged_form_frees_nothing(client: Client, redlock: Redlock, holds: Any) -> None:
    holds("order:1")
    url = ASK + digest(client)
    assert client.post(url, data={"proof": ""}).status_code == 403, "no session"
    sign_in(client)
    other = Client(client.application)
    sign_in(other)
    right = proof(client.get(url))
    for data, headers in [
        ({}, {}),
        ({"proof": ""}, {}),
        ({"proof": "0" * 64}, {}),
        ({"proof": "\udcff\u00e9"}, {}),
        ({"proof": proof(other.get(url))}, {}),
        ({"proof": right}, {"Origin": "http://evil.example"}),
        ({"proof": right}, {"Origin": "null"}),
        ({"proof": right}, {"Origin": "http://["}),
        ({"proof": right}, {"Origin": "http://localhost:81"}),
        ({"proof": right}, {"Sec-Fetch-Site": "cross-site"}),
        ({"proof": right}, {"Sec-Fetch-Site": "same-site"}),
    ]:
        body = {name: value.encode("utf-8", "replace") for name, value in data.items()}
        answer = client.post(url, data=body, headers=headers)
        assert answer.status_code == 403, (data, headers)
    assert held(redlock)


def test_session_cookie_is_kept_from_scripts_and_other_sites(client: Client) -> None:
    answer = sign_in(client)
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and "Max-Age=3600" in cookie
    assert "Secure" not in cookie
    secure = client.post("/login", data={"token": SECRET}, base_url="https://localhost")
    assert "Secure" in secure.headers["Set-Cookie"]
    assert SECRET not in cookie


def test_forged_or_expired_session_is_none(client: Client, page: Page, holds: Any) -> None:
    holds("order:1")
    url = ASK + digest(client)
    old = f"1000000000.x.{page.door._mac('session', '1000000000.x')}"
    sign_in(client)
    good = client.get_cookie("redlock_session")
    assert good is not None
    name, _, mac = good.value.rpartition(".")
    later = f"9{name}"
    for value in (old, f"{later}.{mac}", f"{name}.{'0' * 64}", "x", "..", f"{name}."):
        client.set_cookie("redlock_session", value)
        assert client.get(url).status_code == 303, value
    client.set_cookie("redlock_session", good.value)
    assert client.get(url).status_code == 200


def test_wrong_token_is_not_let_in(client: Client) -> None:
    for word in ("", "wrong", SECRET + "x", SECRET[:-1], "\u00e9"):
        answer = client.post("/login", data={"token": word})
        assert answer.status_code == 403 and "Set-Cookie" not in answer.headers
    forged = client.post(
        "/login", data={"token": SECRET}, headers={"Origin": "http://evil.example"}
    )
    assert forged.status_code == 403 and "Set-Cookie" not in forged.headers


def test_sign_in_redirects_only_to_own_pages(client: Client) -> None:
    for back in (
        *("//evil.example/", "http://evil.example/", "\\\\evil.example", "/\\evil.example"),
        *("javascript:alert(1)", "nodes\r\nX: y", "no-such-page", "../nodes"),
        *("nodes?q=\r\nX: y", "nodes?q=\u00e9"),
    ):
        answer = client.post("/login", data={"token": SECRET, "next": back})
        assert answer.status_code == 303 and answer.location == "/", back
    answer = client.post("/login", data={"token": SECRET, "next": "lock?resource=a%2Fb"})
    assert answer.location == "/lock?resource=a%2Fb"


def test_dashboard_without_a_token_is_read_only(serve: Serve, redlock: Redlock, holds: Any) -> None:
    holds("order:1")
    client = serve()
    assert "Free it" not in client.get("/lock?resource=order:1").text
    assert "Read-only" in client.get("/").text
    url = ASK + digest(client)
    client.set_cookie("redlock_session", "9999999999.x.")
    signed_in = client.post("/login", data={"token": ""})
    for answer in (client.get(url), client.post(url), client.get("/login"), signed_in):
        assert answer.status_code == 403
    assert held(redlock)


def test_private_dashboard_is_read_with_the_token_only(serve: Serve) -> None:
    client = serve(token=SECRET, private=True)
    for path in ("/", "/nodes", "/lock?resource=order:1"):
        answer = client.get(path)
        assert answer.status_code == 303 and "/login" in answer.location
    for path in ("/locks.json", "/nodes.json", "/metrics", "/lock.json?resource=a"):
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert client.get(path, headers=headers).status_code == 401
    right = {"Authorization": f"Bearer {SECRET}"}
    assert client.get("/locks.json", headers=right).status_code == 200
    sign_in(client)
    assert client.get("/").status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "", "localhost:80@evil"]
)
def test_foreign_host_name_is_not_served(client: Client, host: str) -> None:
    for path in ("/", "/locks.json", "/metrics", "/static/style.css", "/login"):
        answer = client.get(path, headers={"Host": host})
        assert answer.status_code == 400 and "host name" in answer.text


@pytest.mark.parametrize(
    ("hosts", "served", "refused"),
    [
        (None, ["localhost", "localhost:8933", "127.0.0.1:1", "[::1]:8933"], ["ops.example.org"]),
        (["ops.example.org", ".internal"], ["ops.example.org", "a.internal"], ["localhost"]),
        (["*"], ["any"], []),
    ],
)
def test_own_host_names_are_served(
    serve: Serve, hosts: list[str] | None, served: list[str], refused: list[str]
) -> None:
    client = serve(hosts=hosts)
    for host in served + refused:
        answer = client.get("/static/style.css", headers={"Host": host})
        assert answer.status_code == (200 if host in served else 400), host


def test_every_answer_has_strict_security_headers(client: Client) -> None:
    for path in ("/", "/locks.json", "/no-such", "/login", "/static/style.css", "/?refresh=2"):
        headers = client.get(path).headers
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; style-src 'self'; img-src 'self';")
        assert "frame-ancestors 'none'" in policy and "base-uri 'none'" in policy
        assert "form-action 'self'" in policy and "unsafe" not in policy
        assert ("script-src" in policy) == (path == "/?refresh=2")
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "same-origin"
        assert "Access-Control-Allow-Origin" not in headers
        if "static" not in path:
            assert headers["Cache-Control"] == "no-store"


def test_pages_have_no_inline_script_or_style(client: Client, holds: Any) -> None:
    holds("order:1")
    sign_in(client)
    for path in ("/", "/lock?resource=order:1", ASK + digest(client), "/nodes?refresh=5"):
        text = client.get(path).text
        assert "<style" not in text and " style=" not in text and "javascript:" not in text
        assert text.count("<script") == text.count("<script src=") <= 1


def test_form_that_is_too_large_is_not_read(client: Client) -> None:
    answer = client.post("/login", data={"token": "x" * 200_000})
    assert answer.status_code == 413


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"token": "short"}, "at least 16 characters"),
        ({"token": ""}, "at least 16 characters"),
        ({"private": True}, "needs a token"),
        ({"hosts": "localhost"}, "list of host names"),
        ({"hosts": []}, "list of host names"),
        ({"user": "ann"}, "user must be a function"),
    ],
)
def test_invalid_option_of_the_dashboard_is_refused_at_once(
    redlock: Redlock, given: Any, said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        make_app(redlock=redlock, **given)
    assert "short" not in str(caught.value)


@pytest.mark.parametrize(
    ("task_id", "words"), [("x; touch /tmp/owned #", ["x; touch /tmp/owned #"]), ("-dnobody", None)]
)
def test_command_to_stop_a_task_on_a_page_quotes_its_id_as_one_word(
    client: Client, redlock: Redlock, task_id: str, words: list[str] | None
) -> None:
    lease = redlock.acquire("order:1", owner=Owner("web-1", 4242, task_id, task="shop.charge"))
    told_all(redlock)
    sign_in(client)
    shown = client.get(ASK + digest(client)).text
    redlock.release(lease)
    found = re.findall('<code class="whole">(celery .*?)</code>', shown)
    assert [shlex.split(html.unescape(line))[6:] for line in found] == ([words] if words else [])


def test_sign_out_ends_the_session_for_every_copy_of_its_cookie(
    client: Client, page: Page, holds: Any
) -> None:
    holds("order:1")
    url = ASK + digest(client)
    other = Client(page)
    sign_in(other)
    sign_in(client)
    copied = client.get_cookie("redlock_session")
    word = proof(client.get("/"))
    assert copied is not None
    assert client.post("/logout").status_code == 403
    client.post("/logout", data={"proof": word})
    assert "Sign in" in client.get("/").text
    client.set_cookie("redlock_session", copied.value)
    assert client.get(url).status_code == 303
    assert client.post(url, data={"proof": word}).status_code == 403
    assert other.get(url).status_code == 200, "another session goes on"


def test_memory_of_ended_sessions_ends_with_their_lifetime(
    client: Client, page: Page, monkeypatch: Patch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(
        "celery_redlock.web.auth.time",
        SimpleNamespace(time=lambda: 1.7e9 + clock[0], monotonic=lambda: clock[0]),
    )
    for _ in range(3):
        sign_in(client)
        client.post("/logout", data={"proof": proof(client.get("/"))})
        assert len(page.door._over) == 1
        clock[0] += 3601


BEHIND = {"REMOTE_ADDR": "192.0.2.3"}


def give(client: Client, token: str, address: str = "192.0.2.1") -> TestResponse:
    return client.post("/login", data={"token": token}, environ_base={"REMOTE_ADDR": address})


def test_tries_at_the_token_are_limited(serve: Serve, monkeypatch: Patch, caplog: Log) -> None:
    clock = [0.0]
    monkeypatch.setattr(
        "celery_redlock.web.auth.time",
        SimpleNamespace(time=lambda: 1.7e9, monotonic=lambda: clock[0]),
    )
    client = serve(token=SECRET, private=True)
    inside, outside = Client(client.application), Client(client.application)
    assert [give(inside, SECRET).status_code for _ in range(30)] == [303] * 30
    assert [give(client, "wrong").status_code for _ in range(10)] == [403] * 10
    refused = give(client, SECRET)
    assert refused.status_code == 429 and refused.headers["Retry-After"] == "60"
    assert "Set-Cookie" not in refused.headers and SECRET not in refused.text
    lines = len(caplog.records)
    give(client, "wrong")
    assert len(caplog.records) == lines, "what is not looked at fills no log"
    assert give(client, SECRET, "192.0.2.2").status_code == 303, "others are let in"
    base = {"REMOTE_ADDR": "192.0.2.1"}
    assert inside.get("/", environ_base=base).status_code == 200, "who is in stays in"
    for token, code in [("wrong", 401)] * 10 + [(SECRET, 429)]:
        headers = {"Authorization": f"Bearer {token}"}
        asked = outside.get("/metrics", headers=headers, environ_base=BEHIND)
        assert asked.status_code == code
    assert give(client, SECRET, BEHIND["REMOTE_ADDR"]).status_code == 303, "nor is who signs in"
    clock[0] = 61.0
    assert give(client, SECRET).status_code == 303


def test_network_of_addresses_counts_as_one_and_the_memory_of_them_is_bounded(
    client: Client, page: Page, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("celery_redlock.web.auth.MAX_ADDRESSES", 20)
    codes = [give(client, "wrong", f"2001:db8::{number:x}").status_code for number in range(11)]
    assert codes == [403] * 10 + [429]
    for number in range(30):
        give(client, "wrong", f"192.0.2.{number}")
    assert len(page.door._wrong) == 20
