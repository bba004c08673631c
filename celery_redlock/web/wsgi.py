"""The WSGI app: routes to the views, as HTML or JSON, and the headers of all answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from werkzeug.exceptions import HTTPException, NotFound
from werkzeug.routing import Map, RequestRedirect, Rule
from werkzeug.utils import redirect
from werkzeug.wrappers import Request, Response

from .. import __version__
from ..config.settings import page_address
from ..protocol.errors import ConfigurationError
from ..protocol.texts import event
from ..survey.waiting import Parked
from . import actions, views
from .formatting import FILTERS
from .views import Ask

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

    from .auth import Door
    from .sources import Sources

__all__ = ["Page"]

logger = logging.getLogger("celery_redlock.web")

VIEWS: dict[str, Callable[[Ask], dict[str, Any]]] = {
    "locks": views.locks,
    "lock": views.lock,
    "waiters": views.waiters,
    "nodes": views.nodes,
    "events": views.events,
}
"""Each is a page, and JSON under the same name with `.json`."""
FORMS: dict[str, Callable[[Ask], actions.PageData | Response]] = {
    "pauses": actions.pauses,
    "release": actions.release,
    "login": actions.login,
    "logout": actions.logout,
}
URLS = Map(
    [
        Rule("/", endpoint="locks", methods=["GET"]),
        Rule("/locks", endpoint="locks", methods=["GET"], alias=True),
        *(Rule(f"/{name}", endpoint=name, methods=["GET"]) for name in VIEWS if name != "locks"),
        *(Rule(f"/{name}.json", endpoint=f"{name}.json", methods=["GET"]) for name in VIEWS),
        Rule("/pauses", endpoint="pauses", methods=["GET", "POST"]),
        Rule("/release", endpoint="release", methods=["GET", "POST"]),
        Rule("/login", endpoint="login", methods=["GET", "POST"]),
        Rule("/logout", endpoint="logout", methods=["POST"]),
        Rule("/metrics", endpoint="metrics", methods=["GET"]),
        Rule("/static/<name>", endpoint="static", methods=["GET"]),
    ]
)
STATIC = {"style.css": "text/css", "live.js": "text/javascript", "icon.svg": "image/svg+xml"}
STATIC_MAX_AGE_S = 300
"""Seconds for which a browser may cache a style sheet or a script."""

POLICY = (
    "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self';"
    " frame-ancestors 'none'; base-uri 'none'"
)
LIVE_POLICY = f"{POLICY}; script-src 'self'; connect-src 'self'"
"""Policy of a page that reloads itself: it allows our script files, but no inline script."""
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not no-referrer: browsers would then send us no Origin with a form either.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
METRICS = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of Prometheus' text format."""
MAX_FORM_BYTES = 64 * 1024
"""Limit for the body of a form; a name of 10 000 characters is in the address instead."""


class Page:
    """The page, as a WSGI app; made by `make_app`."""

    def __init__(self, sources: Sources, door: Door) -> None:
        self.sources, self.door = sources, door
        self._templates = Environment(
            loader=PackageLoader("celery_redlock.web"),
            autoescape=select_autoescape(default=True),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters.update(FILTERS)

    def __call__(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        """Answer one request (WSGI)."""
        request = Request(environ)
        request.max_content_length = request.max_form_memory_size = MAX_FORM_BYTES
        response = self._answer(request)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        response.headers.setdefault("Content-Security-Policy", POLICY)
        return response(environ, start)

    def close(self) -> None:
        """Stop its threads. They are daemons, so they end with the process as well."""
        self.sources.close()

    def _answer(self, request: Request) -> Response:
        if not self.door.serves(request.environ.get("HTTP_HOST", "")):
            return _text(
                "The dashboard is not served under that host name. Name it with --host, or in"
                " make_app(hosts=[...]).",
                400,
            )
        try:
            urls = URLS.bind_to_environ(request.environ)
        except HTTPException as error:  # an invalid host name, if hosts is "*"
            return _text(f"{error.description}", error.code or 400)
        ask = Ask(request, urls, self.sources, self.door)
        try:
            endpoint, values = urls.match()
            if endpoint == "static":
                return _static(values["name"])
            return self._dispatch(ask, endpoint)
        except HTTPException as error:
            return self._failed(ask, error)
        except Exception:
            logger.exception(
                "a page of the web dashboard could not be rendered",
                extra=event("dashboard_page_failed"),
            )
            return _text("This page could not be rendered. The server's log says why.", 500)

    def _dispatch(self, ask: Ask, endpoint: str) -> Response:
        name = endpoint.removesuffix(".json")
        if name in FORMS:
            done = FORMS[name](ask)
            return done if isinstance(done, Response) else self._html(ask, name, *done)
        as_json = endpoint.endswith(".json") or _prefers_json(ask.request)
        if not self.door.may_read(ask.request):
            if not as_json and name != "metrics":
                return actions.to_login(ask)
            refusal = _text("Send the token in a header: Authorization: Bearer TOKEN.", 401)
            refusal.headers["WWW-Authenticate"] = 'Bearer realm="celery_redlock"'
            return refusal
        if name == "metrics":
            return self._metrics()
        facts = VIEWS[name](ask)
        response = _json(facts) if as_json else self._html(ask, name, facts)
        response.vary.add("Accept")
        return response

    def _html(self, ask: Ask, name: str, facts: dict[str, Any], code: int = 200) -> Response:
        session = self.door.session(ask.request)
        text = self._templates.get_template(f"{name}.html").render(
            **facts,
            here=name,
            ask=ask,
            live=ask.live if name in VIEWS else None,
            link=ask.link,
            static=lambda file: ask.urls.build("static", {"name": file}),
            can_free=self.door.can_free,
            session=session,
            proof=self.door.proof(session) if session else "",
            version=__version__,
        )
        text = text.encode("utf-8", "backslashreplace").decode()
        response = Response(text, code, mimetype="text/html")
        if name in VIEWS and ask.live:
            response.headers["Content-Security-Policy"] = LIVE_POLICY
        return response

    def _metrics(self) -> Response:
        """Return the exporter's gauges, or 404 if prometheus_client is not installed."""
        try:
            from ..survey.exporter import exposition

            return Response(exposition(self._registry), content_type=METRICS)
        except (ConfigurationError, ModuleNotFoundError):
            return _text(
                'Metrics need prometheus_client: pip install "celery-redlock[prometheus]"', 404
            )

    @cached_property
    def _registry(self) -> Any:
        from ..survey.exporter import make_registry

        def parked() -> Parked:
            return self.sources.parked() or Parked()

        app = self.sources.app
        return make_registry(
            self.sources.redlock,
            parked=parked if app is not None else None,
            runbook=page_address(app, "runbook"),
        )

    def _failed(self, ask: Ask, error: HTTPException) -> Response:
        if isinstance(error, RequestRedirect):
            return redirect(error.new_url, 308)
        code = error.code or 500
        if _prefers_json(ask.request) or ask.request.path.endswith(".json"):
            return _json({"error": error.description}, code)
        facts = {"title": error.name, "said": error.description}
        response = self._html(ask, "error", facts, code)
        for name, value in error.get_headers():
            if name.lower() in ("allow", "retry-after"):
                response.headers[name] = value
        return response


def _prefers_json(request: Request) -> bool:
    best = request.accept_mimetypes.best_match(["text/html", "application/json"], "text/html")
    return best == "application/json"


def _json(facts: dict[str, Any], code: int = 200) -> Response:
    # ASCII, so that anything that UTF-8 cannot encode is escaped: a key may hold anything.
    text = json.dumps(facts, indent=2, allow_nan=False)
    return Response(text + "\n", code, mimetype="application/json")


def _text(said: str, code: int) -> Response:
    return Response(f"{said}\n", code, mimetype="text/plain")


def _static(name: str) -> Response:
    if name not in STATIC:
        raise NotFound
    body = Path(__file__).with_name("static").joinpath(name).read_bytes()
    response = Response(body, mimetype=STATIC[name])
    response.headers["Cache-Control"] = f"private, max-age={STATIC_MAX_AGE_S}"
    return response
