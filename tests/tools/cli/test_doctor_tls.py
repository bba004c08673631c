"""`doctor` on TLS: each thing that can be wrong is a finding of its own, with its own fix.

The bundled server has no TLS: these run against another, such as Debian's redis-server.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_redlock.cli.context import Site
from celery_redlock.doctor.tls import certificate_trouble
from celery_redlock.server import LocalServer
from tests.support import wanting
from tests.support.certificates import Authority
from tests.tools.cli.clinic import examined

pytestmark = pytest.mark.skipif(
    wanting.tls_server() is None,
    reason=wanting.NO_TLS,
)

PATIENT = ("--timeout", "10")
"""A handshake takes a busy machine more than a second."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def ports(folder: Path) -> Iterator[dict[str, int]]:
    """A server's port without TLS, its port with TLS, and one that wants to see a certificate."""
    ours = Authority(folder, "ours")
    Authority(folder, "theirs")
    cert, key = ours.sign("server", "IP:127.0.0.1")
    files = ["--tls-cert-file", str(cert), "--tls-key-file", str(key)]
    files += ["--tls-ca-cert-file", str(ours.ca)]
    found = {}
    servers = []
    for name, clients in (("tls", "no"), ("strict", "yes")):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            found[name] = free.getsockname()[1]
        config = ["--tls-port", str(found[name]), "--tls-auth-clients", clients, *files]
        config += ["--bind", "127.0.0.1", "127.0.0.2"]
        servers.append(LocalServer(binary=wanting.tls_server(), config=config))
        servers[-1].start()
    yield {**found, "plain": servers[0].port}
    for server in servers:
        server.stop()


@pytest.mark.parametrize(
    ("node", "what", "fix"),
    [
        (
            "redis://127.0.0.1:{tls}",
            "it speaks TLS on this port, and is asked w",
            "write rediss://",
        ),
        ("redis://127.0.0.1:{strict}", "it speaks TLS on this port", "write rediss://"),
        ("rediss://127.0.0.1:{plain}", "it does not speak TLS on this port", "write redis://"),
        ("rediss://127.0.0.1:{tls}", "its certificate is not trusted: ", "add ?ssl_ca_certs=PATH"),
        (
            *("rediss://127.0.0.1:{tls}?ssl_ca_certs={folder}/theirs.pem",),
            *("its certificate is not trusted: ", "add ?ssl_ca_certs=PATH"),
        ),
        (
            *("rediss://127.0.0.2:{tls}?ssl_ca_certs={folder}/ours.pem",),
            *("its certificate is for another name: IP address mismatch", "name it in redlock_"),
        ),
        (
            *("rediss://127.0.0.1:{strict}?ssl_ca_certs={folder}/ours.pem",),
            *("it ends the TLS handshake: ", "add ?ssl_certfile=PATH&ssl_keyfile=PATH"),
        ),
        ("redis://127.0.0.1:1", "it gives no answer: ", "start it, or open the way to it"),
        ("rediss://127.0.0.1:1", "it gives no answer: ", "start it, or open the way to it"),
    ],
)
def test_doctor_names_each_tls_error_with_its_fix(
    ports: dict[str, int], folder: Path, node: str, what: str, fix: str
) -> None:
    code, report = examined(Site(nodes=[node.format(**ports, folder=folder)]), *PATIENT)
    quorum, found = report["findings"]
    assert code == 1 and quorum["check"] == "quorum"
    assert (found["level"], found["check"]) == ("wrong", "reachable")
    assert found["what"].startswith(what) and found["fix"].startswith(fix), found


@pytest.mark.parametrize("why", ["Connection reset by peer.", "Broken pipe."])
def test_reset_while_writing_counts_as_the_end_of_a_tls_handshake(why: str) -> None:
    what, fix = certificate_trouble(f"Error 104 while writing to socket. {why}") or ("", "")
    assert what.startswith("it ends the TLS handshake: ") and "ssl_certfile" in fix


def test_doctor_finds_nothing_with_the_right_certificate(
    ports: dict[str, int], folder: Path
) -> None:
    node = f"rediss://127.0.0.1:{ports['tls']}?ssl_ca_certs={folder}/ours.pem"
    assert examined(Site(nodes=[node]), *PATIENT)[1]["findings"] == []


@pytest.mark.parametrize(
    ("node", "what"),
    [
        ("rediss://127.0.0.1:{tls}?ssl_cert_reqs=none", "its certificate, or its name, is not che"),
        ("redis://default:s3cret@0.0.0.0:{plain}", "its password goes over the network as plain"),
    ],
)
def test_doctor_finds_a_password_that_others_can_learn(
    ports: dict[str, int], node: str, what: str
) -> None:
    _code, report = examined(Site(nodes=[node.format(**ports)]), *PATIENT)
    (found,) = report["findings"]
    assert (found["level"], found["check"]) == ("warning", "tls")
    assert found["what"].startswith(what) and "s3cret" not in str(report)
