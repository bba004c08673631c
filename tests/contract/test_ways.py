"""The ways to a node: TCP, unix socket, TLS."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from celery_redlock import QuorumUnavailable, Redlock
from celery_redlock.server import LocalServer


def use(redlock: Redlock) -> None:
    """Acquire, extend, refuse, release; from several threads, too."""
    lease = redlock.acquire("r")
    assert redlock.try_acquire("r") is None
    assert redlock.extend(lease).remaining() > 0
    assert redlock.release(lease) is True

    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(20):
                assert redlock.release(redlock.acquire(f"{number}:{turn}")) is True
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors


def woken(redlock: Redlock, other: Redlock) -> None:
    """Whoever waits hears of the release."""
    lease = other.acquire("w")
    threading.Timer(0.1, other.release, (lease,)).start()
    assert redlock.release(redlock.acquire("w", wait=10.0)) is True


def test_unix_sockets(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}.sock") for number in range(3)]
    with ExitStack() as stack:
        configs = [["--unixsocket", path] for path in paths]
        servers = [stack.enter_context(LocalServer(config=config)) for config in configs]
        redlock = Redlock([f"unix://{path}" for path in paths])
        other = Redlock([server.url for server in servers])
        stack.callback(redlock.close)
        stack.callback(other.close)
        use(redlock)
        woken(redlock, other)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None or shutil.which("redis-server") is None:
        pytest.skip("needs openssl and Debian's redis-server: the bundled server has no TLS")
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture
def tls_ports(certificate: Path) -> Iterator[list[int]]:
    """Where three servers speak TLS. They also have a plain port, to see them start."""
    with ExitStack() as stack:
        ports = []
        for _ in range(3):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            config = [
                *("--tls-port", str(port), "--tls-auth-clients", "no"),
                *("--tls-cert-file", str(certificate / "cert.pem")),
                *("--tls-key-file", str(certificate / "key.pem")),
                *("--tls-ca-cert-file", str(certificate / "cert.pem")),
            ]
            stack.enter_context(LocalServer(binary=shutil.which("redis-server"), config=config))
            ports.append(port)
        yield ports


def test_tls(tls_ports: list[int], certificate: Path) -> None:
    trust = f"ssl_ca_certs={certificate / 'cert.pem'}"
    redlock = Redlock([f"rediss://localhost:{port}/0?{trust}" for port in tls_ports])
    other = Redlock([f"rediss://localhost:{port}/0?{trust}" for port in tls_ports])
    try:
        use(redlock)
        woken(redlock, other)
        with redlock.lock("many"), ExitStack() as stack:
            # More leases than fit a TLS record: the answer comes in pieces.
            for number in range(300):
                stack.enter_context(redlock.lock(f"one of many {number}", ttl=20.0))
            claims = [redlock.client.claims[token] for token in redlock.client.claims]
            assert len(redlock.client._extend(claims)) == 301
    finally:
        redlock.close()
        other.close()


def test_a_certificate_is_checked(tls_ports: list[int]) -> None:
    redlock = Redlock([f"rediss://localhost:{port}/0" for port in tls_ports])
    try:
        with pytest.raises(QuorumUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            redlock.acquire("r")
    finally:
        redlock.close()
