"""Checks of a request before it may read or change anything: host names, token, sessions, forms.

A page on loopback is open to every program of the machine and to every web site its user visits:

- A site may point its own name at 127.0.0.1 and read this page as its own (DNS rebinding).
  Its requests carry that name, so only known names are served.
- A site may send a form here. So a form carries a proof that it came from a page of this site: a
  MAC over the session, which another site cannot read. The session's cookie is not sent from other
  sites at all (SameSite=Strict), and if the browser reports which site sent the form (Origin), that
  is checked as well.

The operator's token is asked for once. A session lasts an hour and is nothing but a cookie: its end
and a MAC over that, keyed by the token, so that any process of a web server can check it. Signing
out ends it in the process that receives the request, also for a copy of the cookie; other processes
of the same server accept such a copy until the hour is over.

Wrong tokens are counted by address. After too many, tokens from there are refused unread.
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
"""Seconds until the token must be given again."""
MIN_TOKEN_CHARS = 16
"""Minimum length of a token: anyone with a cookie can try tokens against it offline."""
MAX_TRIES, TRIES_WITHIN_S = 10, 60.0
"""Wrong tokens that an address may send, and the seconds for which they are counted."""
MAX_NAME_CHARS = 200
"""Characters of a user's name in the log."""
MAX_ADDRESSES = 10_000
"""Addresses whose wrong tokens are counted; beyond it, the least recent ones are dropped."""


class Door:
    """Access control for requests.

    Args:
        token: The operator's token; None: nobody may free anything.
        hosts: Host names under which the page is served; ".example.org" for all below one. "*"
            serves any name.
        private: True if reading needs the token as well.
        user: Function that names the sender of a request, by its WSGI environ; None: no names.

    Raises:
        ConfigurationError: An argument is invalid, or a token is needed and missing.
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
        """Return True if the page is served under this name: a Host header, with its port.

        Werkzeug's own check is not used: its list supports no IPv6 address, and it accepts requests
        without a host.
        """
        return self._hosts is None or is_known(host_in(host), self._hosts)

    @property
    def can_free(self) -> bool:
        """True if there is a token, so that its owner may free a lock."""
        return self._token is not None

    def accepts_token(self, request: Request, token: str, way: str) -> bool:
        """Return True if this is the operator's token.

        Args:
            request: The request that carried it.
            token: The token to check.
            way: The way it was sent, "form" or "bearer". They are counted apart, so that a program
                that is set up wrongly does not keep people from signing in.

        Raises:
            TooManyRequests: The address has sent too many wrong tokens; this one is not checked.
        """
        if self._token is None:
            return False
        address, now = (way, _network(request.remote_addr or "")), time.monotonic()
        with self._lock:  # count before comparing: many requests may try at once
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
        """Return the session of a request, if it has a valid one."""
        cookie = request.cookies.get(COOKIE, "")
        name, _, mac = cookie.rpartition(".")
        until, _, _nonce = name.partition(".")
        if not name or not _same(mac, self._mac("session", name)):
            return None
        lasts = until.isdecimal() and int(until) > time.time()
        return cookie if lasts and cookie not in self._over else None

    def may_read(self, request: Request) -> bool:
        """Return True if the request may read: a browser by its session, a program by the token."""
        if not self.private or self.session(request):
            return True
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        return scheme.lower() == "bearer" and self.accepts_token(request, token.strip(), "bearer")

    def proof(self, session: str) -> str:
        """Return the proof that a form of this session carries."""
        return self._mac("form", session)

    def has_proof(self, request: Request) -> bool:
        """Return True if a form was sent from a page that this server showed to its session."""
        session = self.session(request)
        return (
            session is not None
            and self.is_same_site(request)
            and _same(request.form.get("proof", ""), self.proof(session))
        )

    def is_same_site(self, request: Request) -> bool:
        """Return True unless the browser reports that another site sent the request."""
        if request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
            return False
        origin = request.headers.get("Origin")
        try:
            return origin is None or urlsplit(origin).netloc.lower() == request.host.lower()
        except ValueError:  # no browser sends such an Origin
            return False

    def begin_session(self, request: Request, response: Response) -> None:
        """Begin a session."""
        name = f"{int(time.time()) + SESSION_S}.{secrets.token_urlsafe(16)}"
        self._set_cookie(request, response, f"{name}.{self._mac('session', name)}", SESSION_S)

    def end_session(self, request: Request, response: Response) -> None:
        """End the session: in this browser, and for every copy of its cookie."""
        cookie = self.session(request)
        if cookie is not None:
            now = time.time()
            with self._lock:
                self._over = {one: until for one, until in self._over.items() if until > now}
                self._over[cookie] = now + SESSION_S
        self._set_cookie(request, response, "", 0)

    def name_of(self, request: Request) -> str:
        """Return the sender of a request, for the log: the user's name on the site, and address.

        Exceptions of the site's function are passed on.
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
    """Return the address under which tokens are counted; of IPv6 its /64, which one client has."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    return address if found.version == 4 else str(ipaddress.ip_network((found, 64), strict=False))


def _same(given: str, right: str) -> bool:
    # Without a token `right` is empty, and nothing matches it.
    return bool(right) and hmac.compare_digest(given.encode("utf-8", "replace"), right.encode())
