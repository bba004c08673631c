"""Coming in, and freeing a lock: the only things here that change anything.

What is freed is the token that was shown, and no other: the confirmed page carries its digest, the
nodes are asked again, and each deletes it only if it still has that very token.
"""

from __future__ import annotations

import logging
from typing import Any

from werkzeug.exceptions import BadRequest, Forbidden, HTTPException
from werkzeug.utils import redirect
from werkzeug.wrappers import Response

from ..protocol.errors import QuorumUnavailable
from ..protocol.values import printable
from ..survey.force_release import force_release
from . import serializers
from .views import Ask, Shown

__all__ = ["login", "logout", "release"]

logger = logging.getLogger("celery_redlock.web")

FREE_WAIT = 3.0
"""Seconds that the nodes are waited for."""
KINDS = ("lock", "reservation", "foreign")
"""What an operator may free here. Fences and marks are promises that somebody relies on."""


def login(ask: Ask) -> Shown | Response:
    """Asks for the operator's token, once an hour."""
    if not ask.door.can_free:
        raise Forbidden("This page is for reading only: it was started without a token.")
    request = ask.request
    back = _ours(ask, request.values.get("next", ""))
    if request.method == "POST":
        if not ask.door.from_us(request):
            raise Forbidden("This form was sent by another site.")
        if ask.door.knows(request, request.form.get("token", ""), "form"):
            response = redirect(back, 303)
            ask.door.let_in(request, response)
            return response
        logger.warning("the page was given a wrong token, from %s", request.remote_addr)
        return Shown({"next": request.values.get("next", ""), "wrong": True}, 403)
    if ask.door.session(request):
        return redirect(back, 303)
    return Shown({"next": request.args.get("next", ""), "wrong": False})


def logout(ask: Ask) -> Response:
    """Ends the session."""
    if not ask.door.proven(ask.request):
        raise Forbidden("This form is not of a page of this session: load the page again.")
    response = redirect(ask.urls.build("locks"), 303)
    ask.door.let_out(ask.request, response)
    return response


def _ours(ask: Ask, path: str) -> str:
    """Where to go on after coming in: a page of ours, or the first."""
    name, mark, query = path.partition("?")
    try:
        ask.urls.match(f"/{name}", method="GET")
    except HTTPException:
        return ask.urls.build("locks")
    if not (path.isascii() and path.isprintable()) or "\\" in name or "/" in name:
        return ask.urls.build("locks")
    return f"{ask.urls.build('locks')}{name}{mark}{query}"


def release(ask: Ask) -> Shown | Response:
    """Shows who holds it and asks; then frees it, if it is still the same."""
    if not ask.door.can_free:
        raise Forbidden("This page is for reading only: it was started without a token.")
    request = ask.request
    if not ask.door.session(request):
        if request.method == "POST":
            raise Forbidden("The session is over: come in again, and look again who holds it.")
        back = request.full_path.rstrip("?").lstrip("/")
        return redirect(ask.urls.build("login", {"next": back}), 303)
    if request.method == "POST" and not ask.door.proven(request):
        raise Forbidden("This form is not of a page of this session: load the page again.")
    kind, digest = request.args.get("kind", "lock"), request.args.get("digest", "")
    slot = request.args.get("slot", 1, type=int)
    if kind not in KINDS or not digest:
        raise BadRequest("What is to be freed? The link on the lock's own page says it.")
    found = ask.sources.one(ask.resource)
    if isinstance(found, QuorumUnavailable):
        return _told(ask, "unknown", None, 503, said=serializers.failure(found))
    entry = next((it for it in found.entries if (it.kind, it.slot) == (kind, slot)), None)
    row = serializers.entry(entry, found.looks) if entry else None
    status = 409 if request.method == "POST" else 200
    if entry is None:
        return _told(ask, "gone", None, status)
    if entry.digest != digest:
        return _told(ask, "changed", row, status)
    if request.method != "POST":
        return _told(ask, "asked", row)
    try:
        freed = force_release(ask.sources.redlock, entry, FREE_WAIT)
    except QuorumUnavailable as error:
        return _told(ask, "unknown", None, 503, said=serializers.failure(error))
    key = printable(entry.key)
    logger.warning("freed from the page, by %s: %s: %s", request.remote_addr, key, freed)
    if freed.outcome != "freed":
        return _told(ask, freed.outcome, None, 409)
    shown = _told(ask, "done", None)
    shown.facts.update(on=freed.nodes, silent=list(freed.silent), taken=freed.taken)
    return shown


def _told(
    ask: Ask, what: str, row: dict[str, Any] | None, status: int = 200, said: str = ""
) -> Shown:
    return Shown(
        {"resource": ask.resource, "what": what, "row": row, "said": printable(said)}, status
    )
