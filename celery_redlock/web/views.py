"""What each page shows: facts out of the sources, as plain data."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from werkzeug.exceptions import BadRequest
from werkzeug.routing import MapAdapter
from werkzeug.wrappers import Request

from ..protocol.errors import QuorumUnavailable
from . import serializers
from .formatting import named_in, quoted

if TYPE_CHECKING:
    from ..survey.snapshot import Survey
    from .auth import Door
    from .sources import Sources

__all__ = ["Ask", "Shown", "events", "lock", "locks", "nodes", "waiters"]

LONGEST = 10_000
"""Characters of a key that a page looks for: a foreign one may be longer than a lock's name."""
LIVE = (2, 300)
"""Seconds between two refreshes of a page, at least and at most."""
FILTERS = ("all", "lock", "reservation", "trouble")


@dataclass
class Ask:
    """A request, and what a view needs to answer it."""

    request: Request
    urls: MapAdapter
    sources: Sources
    door: Door

    @property
    def live(self) -> int | None:
        """Seconds after which the page is to be fetched anew; None: not by itself."""
        asked = self.request.args.get("refresh", type=int)
        return None if asked is None else min(max(asked, LIVE[0]), LIVE[1])

    @property
    def resource(self) -> str:
        """The lock that is asked for.

        Raises:
            BadRequest: None is, or none that can be one.
        """
        name = named_in(self.request.query_string)
        if len(name) > LONGEST:  # each node is asked for all its slots
            raise BadRequest(f"No lock has a name of {len(name)} characters.")
        if not name:
            raise BadRequest("Which lock? The address of this page names one: ?resource=...")
        return name

    def link(self, endpoint: str, resource: str | None = None, **more: Any) -> str:
        """The address of a page; it stays live if this one is."""
        if self.live and "refresh" not in more and not endpoint.endswith(".json"):
            more["refresh"] = self.live
        query = urlencode({name: value for name, value in more.items() if value not in (None, "")})
        if resource is not None:
            query = f"resource={quoted(resource)}" + (f"&{query}" if query else "")
        path = self.urls.build(endpoint)
        return f"{path}?{query}" if query else path

    @property
    def json(self) -> str:
        """This page as JSON."""
        given = {k: v for k, v in self.request.args.items() if k not in ("resource", "refresh")}
        name = self.urls.match()[0].removesuffix(".json")
        return self.link(f"{name}.json", named_in(self.request.query_string) or None, **given)

    def again(self, **more: Any) -> str:
        """This page with some of its arguments changed."""
        given = {k: v for k, v in self.request.args.items() if k not in ("resource", "refresh")}
        resource = named_in(self.request.query_string) or None
        endpoint = self.urls.match()[0].removesuffix(".json")
        return self.link(endpoint, resource, **{**given, **more})


@dataclass
class Shown:
    """What a view has found."""

    facts: dict[str, Any]
    status: int = 200
    template: str = ""


def locks(ask: Ask) -> Shown:
    """What is held and reserved."""
    seen = ask.sources.nodes()
    rows = [row for row in ask.sources.rows(seen) if row["kind"] != "line"]
    args = ask.request.args
    only = args.get("show", "all")
    only = only if only in FILTERS else "all"
    query, by = args.get("q", "")[:1000], args.get("sort", "key")
    by = by if by in serializers.SORTS else "key"
    found = [row for row in rows if _in(row, only) and serializers.matches(row, query)]
    lines = [row for row in ask.sources.rows(seen) if row["kind"] == "line"]
    counts = {
        "held": sum(row["kind"] == "lock" and row["held"] for row in rows),
        "reserved": sum(row["kind"] == "reservation" and row["held"] for row in rows),
        "waiting": sum(row["waiting"] for row in lines),
        "trouble": sum(row["trouble"] for row in rows),
    }
    return Shown(
        {
            **serializers.when(seen, time.time()),
            "nodes": serializers.nodes(seen.what, seen.error),
            "counts": counts,
            "query": query,
            "show": only,
            "sort": by,
            **serializers.page_of(serializers.sort(found, by), args.get("page", 1, type=int)),
        }
    )


def _in(row: dict[str, Any], only: str) -> bool:
    if only == "trouble":
        return bool(row["trouble"])
    return only in ("all", row["kind"])


def lock(ask: Ask) -> Shown:
    """All that is known of one lock."""
    resource = ask.resource
    ask.sources.nodes()  # so that it is watched from now on
    found: Survey | QuorumUnavailable = ask.sources.one(resource)
    error = found if isinstance(found, QuorumUnavailable) else None
    survey = None if isinstance(found, QuorumUnavailable) else found
    entries = [serializers.entry(it, survey.looks) for it in survey.entries] if survey else []
    now = time.time()
    history = ask.sources.history
    told = _told(ask)
    hearing = ask.sources.hearing
    return Shown(
        {
            "at": survey.at if survey else None,
            "age": max(0.0, now - survey.at) if survey else None,
            "failure": serializers.failure(error) if error else None,
            "resource": resource,
            "nodes": serializers.nodes(survey, error),
            "entries": entries,
            "timeline": [serializers.change(it) for it in history.of(resource)],
            "watched_since": history.since or None,
            "heard": hearing.heard(resource)[:50] if hearing else [],
            "listening_since": hearing.since if hearing else None,
            "workers": {
                **told,
                "rows": [
                    {"worker": one["worker"], "what": what, **row}
                    for one in told["rows"]
                    for what in ("holds", "waits")
                    for row in one[what]
                    if resource in (row["resource"] or "").split(" + ")
                ],
            },
        }
    )


def _told(ask: Ask, patience: float = 0.0) -> dict[str, Any]:
    """What the workers said when they were asked last."""
    seen = ask.sources.workers(patience)
    if seen is None:
        return {"asked": False, "at": None, "failure": None, "rows": []}
    error = type(seen.error).__name__ if seen.error else None
    return {"asked": True, "at": seen.at or None, "failure": error, "rows": seen.what or []}


def waiters(ask: Ask) -> Shown:
    """Who waits: lines on the nodes, and what workers say."""
    seen = ask.sources.nodes()
    told = _told(ask, patience=1.5)
    query = ask.request.args.get("q", "")[:1000]
    lines = [row for row in ask.sources.rows(seen) if row["kind"] == "line" and row["waiting"]]
    lines = [row for row in lines if serializers.matches(row, query)]
    lines.sort(key=lambda row: (-row["waiting"], row["resource"]))
    waits = [
        {"worker": one["worker"], **row}
        for one in told["rows"]
        for row in one["waits"]
        if serializers.matches(row, query)
    ]
    waits.sort(key=lambda row: -(row["waited"] or 0.0))
    number = ask.request.args.get("page", 1, type=int)
    return Shown(
        {
            **serializers.when(seen, time.time()),
            "nodes": serializers.nodes(seen.what, seen.error),
            "query": query,
            "lines": serializers.page_of(lines, number),
            "workers": {
                "asked": told["asked"],
                "at": told["at"],
                "failure": told["failure"],
                "answered": [one["worker"] for one in told["rows"] if not one["error"]],
                "without": [
                    {"worker": one["worker"], "error": one["error"]}
                    for one in told["rows"]
                    if one["error"]
                ],
            },
            "waits": serializers.page_of(waits, number),
        }
    )


def nodes(ask: Ask) -> Shown:
    """The nodes: who answers, how fast, how many locks each has."""
    seen = ask.sources.nodes()
    rows = [row for row in ask.sources.rows(seen) if row["kind"] != "line"]
    found = serializers.nodes(seen.what, seen.error)
    past = ask.sources.history.of_nodes()
    for number, node in enumerate(found):
        fresh = seen.error is None
        node["keys"] = sum(row["votes"][number] == "has" for row in rows) if fresh else None
        node["missing"] = (
            sum(row["held"] and row["votes"][number] in ("none", "other") for row in rows)
            if fresh and node["reachable"]
            else None
        )
        node["timeline"] = [serializers.change(it) for it in past.get(node["name"], [])]
    return Shown(
        {
            **serializers.when(seen, time.time()),
            "nodes": found,
            "quorum": len(found) // 2 + 1,
            "watched_since": ask.sources.history.since or None,
        }
    )


def events(ask: Ask) -> Shown:
    """Refusals and losses that workers told of."""
    ask.sources.nodes()
    hearing = ask.sources.hearing
    only = ask.request.args.get("show", "all")
    only = only if only in ("all", "waiting", "lost") else "all"
    query = ask.request.args.get("q", "")[:1000]
    found = [
        one
        for one in (hearing.heard() if hearing else [])
        if only in ("all", one["what"]) and serializers.matches(one, query)
    ]
    return Shown(
        {
            "asked": hearing is not None,
            "listening_since": hearing.since if hearing else None,
            "failure": (hearing.error or None) if hearing else None,
            "heard": hearing.count if hearing else 0,
            "query": query,
            "show": only,
            **serializers.page_of(found, ask.request.args.get("page", 1, type=int)),
        }
    )
