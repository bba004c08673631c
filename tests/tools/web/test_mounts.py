"""The page in Flask, FastAPI and Django, as docs/web.md mounts it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import session
from werkzeug.test import Client

from celery_redlock import Redlock
from celery_redlock.protocol.values import token_digest
from tests.support.names import Log, Request, Servers
from tests.support.nodes import told_all
from tests.tools.web.conftest import proof

ROOT = Path(__file__).parents[3]
NODES = '["redis://redis-1", "redis://redis-2", "redis://redis-3"]'
HOST = "ops.example.org"


def example(name: str, servers: Servers) -> str:
    """The code of docs/web.md for a framework, with these nodes and a token."""
    text = (ROOT / "docs/web.md").read_text(encoding="utf-8")
    found = re.search(rf"^### {name}\n.*?^```python\n(.*?)^```$", text, re.M | re.S)
    assert found and NODES in found[1] and HOST in found[1]
    urls = [server.url for server in servers]
    code = found[1].replace(NODES, f'{urls}; celery_app.conf.redlock_restart_guard = "off"')
    return code.replace(f'hosts=["{HOST}"]', f'hosts=["{HOST}"], token="a-token-of-an-operator"')


@pytest.fixture
def mounted(request: Request, servers: Servers) -> Iterator[dict[str, Any]]:
    """Yield the names that the example has defined."""
    names: dict[str, Any] = {}
    exec(compile(example(request.param, servers), "docs/web.md", "exec"), names)
    names["celery_app"].conf.broker_url = "memory://"
    yield names
    names["page"].close()
    names["celery_app"].close()


FREE = "/locks/release?resource=order:1&kind=lock&slot=1&digest="


def hold(servers: Servers) -> str:
    """Hold a lock that a test will free; return the digest of its token."""
    redlock = Redlock([server.url for server in servers], restart_guard="off")
    lease = redlock.acquire("order:1", ttl=600)
    told_all(redlock)
    redlock.close()
    return token_digest(lease.token)


def who_freed(caplog: Log) -> str:
    lines = [record.getMessage() for record in caplog.records]
    (line,) = (line for line in lines if line.startswith("redlock:order:1 was freed"))
    return re.search(r"by (.*) in the web dashboard", line)[1]


@pytest.mark.parametrize("mounted", ["Flask"], indirect=True)
def test_dashboard_can_be_mounted_in_flask(
    mounted: dict[str, Any], servers: Servers, caplog: Log
) -> None:
    site = mounted["site"]
    site.secret_key = "x"

    @site.get("/log-in")
    def log_in() -> str:
        session["user"] = "ann"
        return "in"

    client = Client(site)
    for path in ("/locks/", "/locks/nodes.json", "/locks/lock?resource=order:1", "/locks/login"):
        assert client.get(path, base_url=f"http://{HOST}").status_code == 403
    client.get("/log-in", base_url=f"http://{HOST}")
    shown = client.get("/locks/", base_url=f"http://{HOST}")
    assert shown.status_code == 200 and 'href="/locks/static/style.css"' in shown.text
    assert client.get("/locks/nodes.json", base_url=f"http://{HOST}").json["quorum"] == 3
    client.get("/log-in", base_url="http://localhost")
    assert client.get("/locks/", base_url="http://localhost").status_code == 400
    assert client.get("/", base_url=f"http://{HOST}").status_code == 404
    let_in = client.post(
        "/locks/login",
        base_url=f"http://{HOST}",
        data={"token": "a-token-of-an-operator", "next": "nodes"},
    )
    assert let_in.location == "/locks/nodes" and "Path=/locks/" in let_in.headers["Set-Cookie"]
    assert "Sign out" in client.get("/locks/", base_url=f"http://{HOST}").text

    url = FREE + hold(servers)
    data = {"proof": proof(client.get(url, base_url=f"http://{HOST}"))}
    from_there = {"REMOTE_ADDR": "192.0.2.7"}
    freed = client.post(url, base_url=f"http://{HOST}", data=data, environ_base=from_there)
    assert "Freed" in freed.text and who_freed(caplog) == "ann at 192.0.2.7"


@pytest.mark.parametrize("mounted", ["FastAPI"], indirect=True)
async def test_dashboard_can_be_mounted_in_fastapi(
    mounted: dict[str, Any], servers: Servers, caplog: Log
) -> None:
    import httpx
    from starlette.authentication import AuthCredentials, AuthenticationBackend, SimpleUser
    from starlette.middleware.authentication import AuthenticationMiddleware

    class ByHeader(AuthenticationBackend):
        async def authenticate(self, conn: Any) -> Any:
            name = conn.headers.get("X-User")
            return (AuthCredentials(), SimpleUser(name)) if name else None

    mounted["site"].add_middleware(AuthenticationMiddleware, backend=ByHeader())
    url = FREE + hold(servers)
    way = httpx.ASGITransport(mounted["site"])
    async with httpx.AsyncClient(transport=way, base_url=f"http://{HOST}") as client:
        for path in ("/locks/", "/locks/nodes.json", "/locks/login"):
            assert (await client.get(path)).status_code == 403
            assert (await client.get(path, headers={"X-User": "mallory"})).status_code == 403
        client.headers["X-User"] = "ann"
        shown = await client.get("/locks/")
        assert shown.status_code == 200 and 'href="/locks/static/style.css"' in shown.text
        assert (await client.get("/locks/nodes.json")).json()["quorum"] == 3
        await client.post("/locks/login", data={"token": "a-token-of-an-operator"})
        assert "Sign out" in (await client.get("/locks/")).text
        other = await client.get("/locks/", headers={"Host": "evil.example"})
        assert other.status_code == 400
        data = {"proof": proof(await client.get(url))}
        assert "Freed" in (await client.post(url, data=data)).text
    assert who_freed(caplog).startswith("ann at ")


DJANGO = """
import io, json, logging, re, sys, types
import django
from django.conf import settings

def staff(get_response):
    def middleware(request):
        request.user = types.SimpleNamespace(
            is_staff="HTTP_X_STAFF" in request.META, get_username=lambda: "ann"
        )
        return get_response(request)
    return middleware

urls = types.ModuleType("urls")
sys.modules["urls"] = urls
sys.modules["project"] = types.ModuleType("project")
sys.modules["project"].staff = staff
settings.configure(
    ROOT_URLCONF="urls", ALLOWED_HOSTS=["*"], SECRET_KEY="x", LOGIN_URL="/log-in/",
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes"],
    MIDDLEWARE=[
        "django.middleware.security.SecurityMiddleware",
        "django.middleware.common.CommonMiddleware",
        "django.middleware.csrf.CsrfViewMiddleware",
        "django.middleware.clickjacking.XFrameOptionsMiddleware",
        "project.staff",
    ],
)
django.setup()
exec(compile(sys.argv[1], "docs/web.md", "exec"), urls.__dict__)
from django.test import Client
log = io.StringIO()
client = Client(enforce_csrf_checks=True, HTTP_HOST="ops.example.org")
outside = client.get("/locks/")
staff = {"HTTP_X_STAFF": "1"}
shown = client.get("/locks/", **staff)
data = {"token": "a-token-of-an-operator", "next": "lock?resource=a%2Fb"}
let_in = client.post("/locks/login", data, HTTP_ORIGIN="http://ops.example.org", **staff)
url = "/locks/release?resource=order:1&kind=lock&slot=1&digest=" + sys.argv[2]
word = re.search('name="proof" value="([0-9a-f]+)"', client.get(url, **staff).content.decode())[1]
logging.basicConfig(stream=log, level=logging.WARNING)
staff |= {"HTTP_ORIGIN": "http://ops.example.org", "REMOTE_ADDR": "192.0.2.7"}
freed = client.post(url, {"proof": word}, **staff)
print(json.dumps({
    "freed": "Freed" in freed.content.decode(),
    "by": re.search("by (.*) in the web dashboard", log.getvalue())[1],
    "outside": outside.status_code,
    "status": shown.status_code,
    "style": 'href="/locks/static/style.css"' in shown.content.decode(),
    "policy": shown.headers["Content-Security-Policy"][:18],
    "nodes": client.get("/locks/nodes.json", **staff).json()["quorum"],
    "other": client.get("/locks/", HTTP_HOST="evil.example", **staff).status_code,
    "let_in": [let_in.status_code, let_in.headers["Location"]],
    "signed_in": "Sign out" in client.get("/locks/", **staff).content.decode(),
    "lock": client.get("/locks/lock.json?resource=%E2%82%AC%2F%25", **staff).json()["resource"],
}))
"""


def test_dashboard_can_be_mounted_in_django(servers: Servers) -> None:
    # In a process of its own: a process has one Django.
    code = example("Django", servers).replace(
        'Celery("shop")', 'Celery("shop", broker="memory://")'
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", DJANGO, code, hold(servers)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "freed": True,
        "by": "ann at 192.0.2.7",
        "outside": 302,
        "status": 200,
        "style": True,
        "policy": "default-src 'none'",
        "nodes": 3,
        "other": 400,
        "let_in": [303, "/locks/lock?resource=a%2Fb"],
        "signed_in": True,
        "lock": "€/%",
    }
