"""What a request must bring to read, and to free a lock: host names, the token, sessions, forms.

A page on loopback is open to every program of the machine and to every web site its user visits:

- A site may point its name at 127.0.0.1 and read what is there like its own pages (DNS rebinding).
  Its requests carry that name: only known ones are served.
- A site may send a form here. So a form carries a proof that it came from a page of ours: a MAC
  over the session, which another site cannot read. The session's cookie is not sent from other
  sites at all (SameSite=Strict), and where the browser says whose page sent the form (Origin), that
  is looked at as well.

The operator's token is asked for once; a session lasts an hour and is nothing but a cookie: when
it ends and a MAC over that, keyed by the token, so that any process of a web server can check it.
Signing out ends it in the process that is told so, also for a copy of the cookie; other processes
of the same server accept such a copy until the hour is over.

Wrong tokens are counted by address, and too many are not compared any more.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from werkzeug.exceptions import TooManyRequests
from werkzeug.wrappers import Request, Response

from ..protocol.errors import ConfigurationError
from ..protocol.texts import printable
from .serve import host_in, is_known

__all__ = ["Door"]

COOKIE = "redlock_session"
SESSION_S = 3600
"""Until the token must be given again."""
MIN_TOKEN_CHARS = 16
"""Anybody who sees a cookie may try tokens on it without asking us."""
MAX_TRIES, TRIES_WITHIN_S = 10, 60.0
"""Wrong tokens that an address may give, and for how long they are counted."""
MAX_NAME_CHARS = 200
"""Of a user's name in the log."""
MAX_ADDRESSES = 10_000
"""Of which wrong tokens are remembered; of more, those that were wrong longest ago are not."""


class Door:
    """Checks what a request brings.

    Args:
        token: The operator's; None: nobody may free anything.
        hosts: Host names under which the page is served; ".example.org" for all below one. "*"
            serves any name.
        private: Whether reading needs the token as well.
        user: Names whoever has sent a request, by its WSGI environ; None: nobody is named.

    Raises:
        ConfigurationError: One of them cannot be what it is given for, or there is no token where
            one is needed.
    """

    def __init__(
        self,
        token: str | None,
        hosts: Sequence[str],
        private: bool,
        user: Callable[[dict[str, Any]], str | None] | None = None,
    ) -> None:
        if isinstance(hosts, str) or not hosts or not all(isinstance(h, str) for h in hosts):
            raise ConfigurationError(f"hosts must be a list of host names; it is {hosts!r}")
        if token is not None and (not isinstance(token, str) or len(token) < MIN_TOKEN_CHARS):
            raise ConfigurationError(
                f"the token of the page must have at least {MIN_TOKEN_CHARS} characters: make one"
                " with python -c 'import secrets; print(secrets.token_urlsafe(24))'"
            )
        if private and token is None:
            raise ConfigurationError("private=True needs a token: nobody could read the page")
        if user is not None and not callable(user):
            raise ConfigurationError(
                f"user must be a function that takes the WSGI environ of a request and returns a"
                f" name; it is {user!r}"
            )
        self.private = private
        self._user = user
        self._hosts = None if "*" in hosts else [host.lower() for host in hosts]
        self._token = None if token is None else _bytes(token)
        self._lock = threading.Lock()
        self._over: dict[str, float] = {}
        self._wrong: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()

    def serves(self, host: str) -> bool:
        """Return whether the page is served under that name: a Host header, with its port.

        Not left to werkzeug, whose list knows no IPv6 address and lets a request without a host
        pass.
        """
        return self._hosts is None or is_known(host_in(host), self._hosts)

    @property
    def can_free(self) -> bool:
        """Whether anybody may free a lock."""
        return self._token is not None

    def knows(self, request: Request, token: str, way: str) -> bool:
        """Return whether this is the operator's token.

        Args:
            request: What it came with.
            token: What is given.
            way: How: "form" or "bearer". They are counted apart, so that a program that is set up
                wrongly does not keep people from signing in.

        Raises:
            TooManyRequests: That address has given too many wrong ones; this one is not looked at.
        """
        if self._token is None:
            return False
        address, now = (way, _network(request.remote_addr or "")), time.monotonic()
        with self._lock:  # counted first: many may try at once
            until, count = self._wrong.pop(address, (0.0, 0))
            if until <= now:
                until, count = now + TRIES_WITHIN_S, 0
            self._wrong[address] = until, min(count + 1, MAX_TRIES)
            if len(self._wrong) > MAX_ADDRESSES:
                self._wrong.popitem(last=False)
        if count >= MAX_TRIES:
            raise TooManyRequests(
                "Too many wrong tokens came from your address: try again in a minute.",
                retry_after=math.ceil(until - now),
            )
        given, right = _bytes(token), self._token
        same = hmac.compare_digest(hashlib.sha256(given).digest(), hashlib.sha256(right).digest())
        if same:
            with self._lock:
                until, count = self._wrong.get(address, (until, 1))
                self._wrong[address] = until, count - 1
        return same

    def session(self, request: Request) -> str | None:
        """Return the session of a request that has a valid one."""
        cookie = request.cookies.get(COOKIE, "")
        name, _, mac = cookie.rpartition(".")
        until, _, _nonce = name.partition(".")
        if not name or not _same(mac, self._mac("session", name)):
            return None
        lasts = until.isdecimal() and int(until) > time.time()
        return cookie if lasts and cookie not in self._over else None

    def may_read(self, request: Request) -> bool:
        """Return whether a browser may read, by its session, or a program, by the token."""
        if not self.private or self.session(request):
            return True
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        return scheme.lower() == "bearer" and self.knows(request, token.strip(), "bearer")

    def proof(self, session: str) -> str:
        """Return what a form of this session carries."""
        return self._mac("form", session)

    def proven(self, request: Request) -> bool:
        """Return whether a form was sent from a page of ours that this session was shown."""
        session = self.session(request)
        return (
            session is not None
            and self.from_us(request)
            and _same(request.form.get("proof", ""), self.proof(session))
        )

    def from_us(self, request: Request) -> bool:
        """Return whether the browser does not say that another site has sent this."""
        if request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
            return False
        origin = request.headers.get("Origin")
        try:
            return origin is None or urlsplit(origin).netloc.lower() == request.host.lower()
        except ValueError:  # no browser says that
            return False

    def let_in(self, request: Request, response: Response) -> None:
        """Begin a session."""
        name = f"{int(time.time()) + SESSION_S}.{secrets.token_urlsafe(16)}"
        self._set_cookie(request, response, f"{name}.{self._mac('session', name)}", SESSION_S)

    def let_out(self, request: Request, response: Response) -> None:
        """End a session: in this browser, and for every copy of its cookie."""
        cookie = self.session(request)
        if cookie is not None:
            now = time.time()
            with self._lock:
                self._over = {one: until for one, until in self._over.items() if until > now}
                self._over[cookie] = now + SESSION_S
        self._set_cookie(request, response, "", 0)

    def name_of(self, request: Request) -> str:
        """Return who has sent a request, for the log: the site's name for them, and their address.

        Whatever the site's function raises is raised here.
        """
        name = self._user(request.environ) if self._user is not None else None
        address = request.remote_addr or "an unknown address"
        return printable(f"{name!s:.{MAX_NAME_CHARS}} at {address}" if name else address)

    def _set_cookie(self, request: Request, response: Response, value: str, lasts: int) -> None:
        response.set_cookie(
            COOKIE,
            value,
            max_age=lasts,
            path=f"{request.root_path}/",
            secure=request.is_secure,
            httponly=True,
            samesite="Strict",
        )

    def _mac(self, use: str, text: str) -> str:
        if self._token is None:
            return ""
        return hmac.new(
            self._token, _bytes(f"celery_redlock.web {use} {text}"), "sha256"
        ).hexdigest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _network(address: str) -> str:
    """Return what stands for an address: of IPv6 its network, all of which anybody may have."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    return address if found.version == 4 else str(ipaddress.ip_network((found, 64), strict=False))


def _same(given: str, right: str) -> bool:
    # Nothing is right where there is no token.
    return bool(right) and hmac.compare_digest(given.encode("utf-8", "replace"), right.encode())
