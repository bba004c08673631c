"""TLS checks: only one side speaks TLS, or a certificate is not accepted or not checked."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
from collections.abc import Iterator
from typing import Any

from redis import RedisError
from redis.connection import UnixDomainSocketConnection

from ..stores.kinds import named
from ..stores.redis.address import Address
from .report import Finding, warning

__all__ = ["NOTHING", "certificate_trouble", "other_protocol", "secrecy"]

NOTHING = "nothing"
"""In place of a protocol: it accepts connections, and answers nothing."""
PLAIN_ANSWERS = (b"+", b"-")
"""First bytes of a Redis server's answer to PING."""


def other_protocol(address: Address, timeout: float) -> str:
    """Return the other protocol that a silent node speaks: "TLS" or "plain Redis".

    It is `NOTHING` if the node accepts a connection, and does not answer; "" in all other cases.

    Args:
        address: The node. It is sent a PING or a TLS handshake, and nothing else.
        timeout: Seconds to wait for it.
    """
    if issubclass(address.connection_class, UnixDomainSocketConnection):
        return ""
    with contextlib.suppress(OSError, RedisError):
        made = address.connection()  # this may ask the Sentinels for the node's host and port
        return _protocol((made.host, int(made.port)), timeout, asked_tls=address.speaks_tls)
    return ""


def _protocol(where: tuple[str, int], timeout: float, *, asked_tls: bool) -> str:
    with socket.create_connection(where, timeout) as plain:
        plain.settimeout(timeout)
        with contextlib.suppress(TimeoutError):
            if asked_tls:
                plain.sendall(b"PING\r\n")
                return "plain Redis" if plain.recv(1) in PLAIN_ANSWERS else ""
            return "TLS" if _shakes_hands(plain) else ""
        return NOTHING


def _shakes_hands(plain: socket.socket) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        context.wrap_socket(plain).close()
    except ssl.SSLError as error:
        return "ALERT" in str(error)  # it speaks TLS, and requires something that we lack
    return True


def certificate_trouble(why: str) -> tuple[str, str] | None:
    """Return what is wrong with a certificate, and the remedy, from the error of a connection.

    None if the error has another cause.
    """
    if found := re.search(r"certificate verify failed: (.*?)\.? ?(\(_ssl|$)", why):
        said = found[1]
        if "mismatch" in said or "not valid for" in said:
            fix = "name it in redlock_nodes as its certificate does, or give it one for this name"
            return f"its certificate is for another name: {said}", fix
        if "expired" in said or "not yet valid" in said:
            return f"its certificate is not valid now: {said}", "renew it, and check both clocks"
        fix = "add ?ssl_ca_certs=PATH to its URL, the certificate of the authority that signed it"
        return f"its certificate is not trusted: {said}", fix
    # With TLS 1.3 the server may hang up while we already write.
    if re.search(r"EOF occurred in violation|ALERT|alert|reset by peer|Broken pipe", why):
        fix = "add ?ssl_certfile=PATH&ssl_keyfile=PATH to its URL, if it wants to see a certificate"
        return f"it ends the TLS handshake: {why}", fix
    return None


def secrecy(probe: Any, _site: Any) -> Iterator[Finding]:
    """Find ways in which others can learn a node's password, for any kind of store."""
    address = probe.address
    if address.unverified:
        yield warning(
            f"its certificate, or its name, is not checked ({address.unverified}): any server that"
            " answers in its place receives the password, and grants locks",
            named(address.store).verify,
        )
    if address.exposed:
        yield warning(*address.exposed)
