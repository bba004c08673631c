"""`redlock web`: where it serves, where it refuses to, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from typing import Any

import pytest
from click.testing import CliRunner

from celery_redlock.cli import main
from celery_redlock.web.serve import check_bind, host_in, is_known, is_loopback, names_for
from tests.support.names import Patch, Servers
from tests.support.wait import wait_until
from tests.tools.web.conftest import SECRET

NODES = ("--nodes", "redis://127.0.0.1:1,redis://127.0.0.1:2,redis://127.0.0.1:3")


def test_server_of_the_dashboard_survives_idle_connections_and_ends_by_interrupt(
    servers: Servers,
) -> None:
    """Each connection sends half a request, and then a byte now and then, as an attacker would."""
    urls = ",".join(server.url for server in servers)
    code = "import sys; sys.argv = ['celery-redlock', *sys.argv[1:]]; "
    command = [sys.executable, "-c", f"{code}from celery_redlock.cli import main; main()"]
    opened: list[socket.socket] = []
    with subprocess.Popen(
        [*command, "web", "--listen", "127.0.0.1:0", "--json"],
        env={**os.environ, "REDLOCK_NODES": urls, "REDLOCK_WEB_TOKEN": SECRET},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            assert told["url"].startswith("http://127.0.0.1:") and told["read_only"] is False
            with urllib.request.urlopen(f"{told['url']}nodes.json", timeout=60) as answer:
                assert json.load(answer)["quorum"] == 3
                assert "waitress" not in (answer.headers["Server"] or "")

            port = int(told["url"].rsplit(":", 1)[1].strip("/"))
            for _ in range(200):
                opened.append(socket.create_connection(("127.0.0.1", port)))
                opened[-1].sendall(b"GET /nodes HTTP/1.1\r\nHost: lo")
            with urllib.request.urlopen(f"{told['url']}static/style.css", timeout=10) as answer:
                assert answer.status == 200
            wait_until(lambda: closed(opened) >= 100, 20, "the oldest have given way")
            assert closed(opened) < 150, "all are closed"

            process.send_signal(signal.SIGINT)
            _out, errors = process.communicate(timeout=60)
        finally:
            process.kill()
            for one in opened:
                one.close()
    assert process.returncode == 0 and "Traceback" not in errors and SECRET not in errors


def closed(connections: list[socket.socket]) -> int:
    count = 0
    for one in connections:
        try:
            one.sendall(b"c")
            count += not one.recv(1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        except OSError:
            count += 1
    return count


def call(*arguments: str, **env: str) -> Any:
    return CliRunner().invoke(main, [*NODES, "web", *arguments], env=env)


@pytest.mark.parametrize("bind", ["0.0.0.0", "192.0.2.1", "::", "ops.example.org"])
def test_other_machines_are_kept_out_unless_public_is_given(monkeypatch: Patch, bind: str) -> None:
    monkeypatch.setattr("celery_redlock.web.serve.serve", lambda *_given: None)
    where = f"[{bind}]:0" if ":" in bind else f"{bind}:0"
    refused = call("--listen", where, "--token", SECRET)
    assert refused.exit_code == 2 and "--public" in refused.output
    for address in (where, "127.0.0.1:0"):
        refused = call("--listen", address, "--public")
        assert refused.exit_code == 2 and "REDLOCK_WEB_TOKEN" in refused.output
    check_bind(bind, SECRET, True)


def test_dashboard_for_other_machines_is_private_and_warned_of(monkeypatch: Patch) -> None:
    served: list[Any] = []
    monkeypatch.setattr("celery_redlock.web.serve.serve", lambda *given: served.append(given))
    result = call("--listen", "0.0.0.0:0", "--public", REDLOCK_WEB_TOKEN=SECRET)
    assert result.exit_code == 0 and "sees the token" in result.output
    assert served[0][0].door.private
    assert call("--token", SECRET).exit_code == 0 and not served[1][0].door.private
    # Behind a proxy, as the page on it says: it is on loopback, and read by other machines.
    behind = call("--public", "--host", "ops.example.org", REDLOCK_WEB_TOKEN=SECRET)
    assert (
        behind.exit_code == 0
        and served[2][0].door.private
        and served[2][1:3]
        == (
            "127.0.0.1",
            8933,
        )
    )


def test_short_token_and_taken_port_are_refused(servers: Servers) -> None:
    assert "at least 16 characters" in call("--token", "short").output
    taken = call("--listen", f"127.0.0.1:{servers[0].port}")
    assert taken.exit_code == 2 and "cannot serve on 127.0.0.1" in taken.output


def test_loopback_is_told_from_other_hosts() -> None:
    for host in ("127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"):
        assert is_loopback(host), host
    for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.example.org", "127.0.0.1.nip.io", ""):
        assert not is_loopback(host), host
    assert names_for("0.0.0.0", []) == ["localhost", "127.0.0.1", "[::1]"]
    assert "10.0.0.1" in names_for("10.0.0.1", ["ops"]) and "ops" in names_for("10.0.0.1", ["ops"])


def test_dashboard_without_its_extra_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['werkzeug'] = None; import celery_redlock\n"
        "from celery_redlock.web import make_app\n"
        "lock = celery_redlock.Redlock(['redis://127.0.0.1:1'])\n"
        "try: make_app(redlock=lock)\n"
        "except celery_redlock.ConfigurationError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert 'pip install "celery-redlock[web]"' in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("Ops.Example.org:80", "ops.example.org"),
        ("[::1]:8933", "[::1]"),
        ("a@b", ""),
        ("a b", ""),
        ("", ""),
        ("a:123456", ""),
    ],
)
def test_host_header_is_read_as_a_name_or_refused(header: str, name: str) -> None:
    assert host_in(header) == name
    assert is_known(name, [".example.org", "[::1]"]) is bool(name)
    assert not is_known(name, ["", "example.org"])
