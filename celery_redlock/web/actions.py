"""Views that change something: sign in, free a lock, pause keys.

Only the token that was shown is freed: the confirmed page carries its digest, the nodes are asked
again, and each deletes the key only if it still has that very token.
"""

from __future__ import annotations

import logging
from typing import Any

from werkzeug.exceptions import BadRequest, Forbidden, HTTPException
from werkzeug.utils import redirect
from werkzeug.wrappers import Response

from ..locking.pauses import MAX_TEXT_CHARS, begin, in_force, resume
from ..locking.redlock import Redlock
from ..protocol.errors import NotAcquired, QuorumUnavailable, RedlockError
from ..protocol.names import escaped
from ..protocol.texts import event, printable
from ..survey.force_release import force_release
from . import serializers
from .formatting import named_in
from .history import who
from .views import Ask

__all__ = ["login", "logout", "pauses", "release", "to_login"]

PageData = tuple[dict[str, Any], int]
"""The data for a page, and its HTTP status."""

logger = logging.getLogger("celery_redlock.web")

RELEASE_TIMEOUT_S = 3.0
"""Seconds after which a node that has not answered counts as silent."""
KINDS = ("lock", "reservation", "foreign")
"""Kinds that an operator can free here. Fences and marks must stay: others rely on them."""
READ_ONLY = "The dashboard is read-only: it was started without a token."
NOT_PROVEN = "This form does not belong to your session. Reload the page and try again."


def to_login(ask: Ask) -> Response:
    """Redirect to the sign-in page, which leads back to this page afterwards."""
    back = ask.request.full_path.rstrip("?").lstrip("/")
    return redirect(ask.urls.build("login", {"next": back}), 303)


def login(ask: Ask) -> PageData | Response:
    """Ask for the operator's token, and begin a session of an hour."""
    if not ask.door.can_free:
        raise Forbidden(READ_ONLY)
    request = ask.request
    after = request.values.get("next", "")
    if request.method != "POST":
        if ask.door.session(request):
            return redirect(_return_address(ask, after), 303)
        return {"next": after, "wrong": False}, 200
    if not ask.door.is_same_site(request):
        raise Forbidden("This form was sent by another site.")
    if not ask.door.accepts_token(request, request.form.get("token", ""), "form"):
        logger.warning(
            "a wrong token was entered in the web dashboard, from %s",
            request.remote_addr,
            extra=event("dashboard_token_wrong"),
        )
        return {"next": after, "wrong": True}, 403
    response = redirect(_return_address(ask, after), 303)
    ask.door.begin_session(request, response)
    return response


def logout(ask: Ask) -> Response:
    """End the session."""
    if not ask.door.has_proof(ask.request):
        raise Forbidden(NOT_PROVEN)
    response = redirect(ask.urls.build("locks"), 303)
    ask.door.end_session(ask.request, response)
    return response


def _return_address(ask: Ask, path: str) -> str:
    """Return the address to go to after signing in: a page of this site, or else the first page."""
    first = ask.urls.build("locks")
    try:
        ask.urls.match(f"/{path.partition('?')[0]}", method="GET")
    except HTTPException:
        return first
    return first + path if path.isascii() and path.isprintable() else first


def _login_first(ask: Ask, ended: str) -> Response | None:
    """Return a redirect if the user must sign in first; None if the user may change things.

    Raises:
        Forbidden: Nobody may change things; or the form is from another site, or from a session
            that has ended.
    """
    if not ask.door.can_free:
        raise Forbidden(READ_ONLY)
    changes = ask.request.method == "POST"
    if not ask.door.session(ask.request):
        if changes:
            raise Forbidden(f"Your session has ended. Sign in, and {ended}.")
        return to_login(ask)
    if changes and not ask.door.has_proof(ask.request):
        raise Forbidden(NOT_PROVEN)
    return None


def pauses(ask: Ask) -> PageData | Response:
    """Show the paused keys; pause some, or resume them."""
    if (first := _login_first(ask, "check again what is paused")) is not None:
        return first
    request, redlock, said, code = ask.request, ask.sources.redlock, "", 200
    pattern = request.form.get("pattern", "").removeprefix(redlock.prefix)
    if request.method != "POST":  # the link on a lock's own page names the lock
        pattern = printable(escaped(named_in(request.query_string)))
    try:
        if request.method == "POST":
            said = _pause_or_resume(ask, redlock, pattern)
        found, sure = in_force(redlock)
        code = code if sure else 503
    except NotAcquired as error:
        found, said, code = (), serializers.failure(error), 503
    except RedlockError as error:
        found, said, code = in_force(redlock)[0], str(error), 400
    shown = [pause.data() for pause in found]
    return {"pauses": shown, "pattern": pattern, "said": printable(said), "code": code}, code


def _pause_or_resume(ask: Ask, redlock: Redlock, pattern: str) -> str:
    form, user = ask.request.form, ask.door.name_of(ask.request)
    if form.get("do") == "resume":
        ended, silent = resume(redlock, pattern)
        logger.warning(
            "%s was resumed by %s in the web dashboard",
            printable(pattern),
            user,
            extra=event("key_resumed"),
        )
        away = f" These nodes did not answer: {', '.join(silent)}." if silent else ""
        return f"{pattern} was {'resumed' if ended else 'not paused'}.{away}"
    seconds = form.get("seconds", 0.0, type=float)
    pause = begin(redlock, pattern, seconds, user[:MAX_TEXT_CHARS], form.get("reason", ""))
    logger.warning("%s in the web dashboard", pause, extra=event("key_paused"))
    return f"{pause}. Every worker applies it within 2 seconds."


def release(ask: Ask) -> PageData | Response:
    """Show the holder and ask; then free the lock, if its holder is still the same."""
    if (first := _login_first(ask, "check again who holds the lock")) is not None:
        return first
    request = ask.request
    confirmed = request.method == "POST"
    kind, digest = request.args.get("kind", "lock"), request.args.get("digest", "")
    slot = request.args.get("slot", 1, type=int)
    if kind not in KINDS or not digest:
        raise BadRequest(
            "The address does not say what to free. Use the button on the lock's page."
        )
    try:
        found = ask.sources.one(ask.resource)
    except QuorumUnavailable as error:
        return _outcome(ask, "unknown", 503, said=serializers.failure(error))
    of_kind = (it for it in found.entries if it.kind == kind)
    shown = (it for it in of_kind if (it.digest == digest if it.shared else it.slot == slot))
    entry = next(shown, None)
    if entry is None:
        return _outcome(ask, "gone", 409 if confirmed else 200)
    row = serializers.entry(entry, found.looks)
    if entry.digest != digest:
        return _outcome(ask, "changed", 409 if confirmed else 200, row=row)
    if not confirmed:
        return _outcome(ask, "asked", row=row)
    user, key = ask.door.name_of(request), printable(entry.key)  # if this raises, nothing is freed
    try:
        freed = force_release(ask.sources.redlock, entry, RELEASE_TIMEOUT_S)
    except QuorumUnavailable as error:
        logger.warning(
            "%s could not be freed for %s: %s",
            key,
            user,
            serializers.failure(error),
            extra=event("not_released"),
        )
        return _outcome(ask, "unknown", 503, said=serializers.failure(error))
    if freed.outcome != "freed":
        why = "it was gone already" if freed.outcome == "gone" else "another has it now"
        logger.info("%s was not freed for %s: %s", key, user, why, extra=event("not_released"))
        return _outcome(ask, freed.outcome, 409)
    holder = printable(who(entry)) or "another program"
    logger.warning(
        "%s was freed on %d of %d nodes by %s in the web dashboard; %s had it (token %s)",
        *(key, freed.nodes, entry.total, user, holder, entry.digest),
        extra=event("released_by_operator"),
    )
    return _outcome(ask, "done", on=freed.nodes, silent=list(freed.silent), taken=freed.taken)


def _outcome(ask: Ask, what: str, status: int = 200, *, said: str = "", **more: Any) -> PageData:
    facts = {"resource": ask.resource, "what": what, "row": None, "said": printable(said)}
    return {**facts, **more}, status
