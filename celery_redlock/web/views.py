"""Views: the data of each page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from werkzeug.exceptions import BadRequest
from werkzeug.routing import MapAdapter
from werkzeug.wrappers import Request

from ..protocol.errors import QuorumUnavailable
from ..protocol.values import quorum_of
from ..survey.waiting import waited_for
from .formatting import named_in, quoted
from .health import NOT_CHECKED
from .serializers import SORTS, entry, failure, matches, page_of
from .serializers import nodes as node_rows

if TYPE_CHECKING:
    from .auth import Door
    from .sources import Sources

__all__ = ["Ask", "events", "lock", "locks", "nodes", "waiters"]

MAX_KEY_CHARS = 10_000
"""Characters of a key to look for: a foreign key may be longer than a lock's name."""
MAX_QUERY_CHARS = 1000
"""Characters of a search; each row is compared with each of its words."""
REFRESH_S = (2, 300)
"""Seconds between two refreshes of a page: minimum and maximum."""
WAITERS_PATIENCE_S = 1.5
"""Seconds for which the page of waiters waits for the workers' answers, which take a second."""
MAX_LOCK_EVENTS = 50
"""Events on a lock's own page: about as many as changes in its timeline."""


@dataclass
class Ask:
    """A request, with the objects that a view needs to answer it."""

    request: Request
    urls: MapAdapter
    sources: Sources
    door: Door

    @property
    def live(self) -> int | None:
        """Seconds after which the page reloads itself; None: only when the reader reloads it."""
        asked = self.request.args.get("refresh", type=int)
        return None if asked is None else min(max(asked, REFRESH_S[0]), REFRESH_S[1])

    @property
    def resource(self) -> str:
        """The lock that the request names.

        Raises:
            BadRequest: It names none, or one that cannot exist.
        """
        name = named_in(self.request.query_string)
        if len(name) > MAX_KEY_CHARS:  # a limit, because each node is asked for all slots of it
            raise BadRequest(f"No lock has a name of {len(name)} characters.")
        if not name:
            raise BadRequest("The address must name a lock: ?resource=NAME.")
        return name

    @property
    def query(self) -> str:
        """The text to search for."""
        return self.request.args.get("q", "")[:MAX_QUERY_CHARS]

    @property
    def page(self) -> int:
        """The requested page of a long list."""
        return self.request.args.get("page", 1, type=int)

    def one_of(self, name: str, first: str, *others: str) -> str:
        """Return the value of an argument if it is an allowed one, else `first`."""
        given = self.request.args.get(name, first)
        return given if given in others else first

    def link(self, endpoint: str, resource: str | None = None, **more: Any) -> str:
        """Return the address of a page; it keeps reloading if this page does."""
        if self.live and "refresh" not in more and not endpoint.endswith(".json"):
            more["refresh"] = self.live
        query = urlencode({name: value for name, value in more.items() if value not in (None, "")})
        if resource is not None:
            query = f"resource={quoted(resource)}" + (f"&{query}" if query else "")
        path = self.urls.build(endpoint)
        return f"{path}?{query}" if query else path

    def again(self, as_json: bool = False, **more: Any) -> str:
        """Return the address of this page, with some of its arguments changed."""
        given = {k: v for k, v in self.request.args.items() if k not in ("resource", "refresh")}
        endpoint = self.urls.match()[0].removesuffix(".json") + ".json" * as_json
        resource = named_in(self.request.query_string) or None
        return self.link(endpoint, resource, **{**given, **more})


def locks(ask: Ask) -> dict[str, Any]:
    """Show locks and reservations."""
    seen, parked = ask.sources.nodes(), ask.sources.parked()
    rows, queues = ask.sources.rows(seen, parked)
    show = ask.one_of("show", "all", "lock", "reservation", "trouble")
    by = ask.one_of("sort", *SORTS)
    found = [
        row
        for row in rows
        if (row["trouble"] if show == "trouble" else show in ("all", row["kind"]))
        and matches(row, ask.query)
    ]
    has_app = ask.sources.app is not None
    return {
        **ask.sources.looked(seen),
        "counts": {
            "held": sum(row["kind"] == "lock" and row["held"] for row in rows),
            "reserved": sum(row["kind"] == "reservation" and row["held"] for row in rows),
            "waiting": sum(row["waiting"] for row in queues) if has_app else None,
            "parked_known": parked is not None,
            "trouble": sum(row["trouble"] for row in rows),
        },
        "pauses": [pause.data() for pause in seen.what.pauses] if seen.what else [],
        "query": ask.query,
        "show": show,
        "sort": by,
        **page_of(sorted(found, key=SORTS[by]), ask.page),
    }


def lock(ask: Ask) -> dict[str, Any]:
    """Show everything known about one lock."""
    resource, sources = ask.resource, ask.sources
    sources.nodes()  # starts the surveys, so that the lock has a history from now on
    parked, receiver, reports = sources.parked(), sources.receiver, sources.workers()
    survey, error, entries = None, None, []
    try:
        survey = sources.one(resource, parked)
    except QuorumUnavailable as failed:
        error = failed
    else:  # only this lock's own queue: `parked` adds those of other locks
        shown = [it for it in survey.entries if it.kind != "line" or it.resource == resource]
        entries = [entry(it, survey.looks) for it in shown]
    workers = [
        {"worker": one["worker"], "what": what, **row}
        for one in reports["rows"]
        for what in ("holds", "waits")
        for row in one[what]
        if resource in (row["resource"], *(row["resource"] or "").split(" + "))
    ]
    reported = _reported(reports["rows"])[resource]
    waiting = max((row["waiting"] for row in entries if row["kind"] == "line"), default=0)
    return {
        "at": survey.at if survey else None,
        "age": 0.0 if survey else None,
        "failure": failure(error) if error else None,
        "resource": resource,
        "pauses": [pause.data() for pause in survey.pauses] if survey else [],
        "no_quorum": sources.no_quorum,
        "nodes": node_rows(survey, error, sources.health),
        "entries": entries,
        "parked_known": parked is not None,
        "unreported": None if parked is None else max(0, waiting - reported),
        "timeline": [vars(it) for it in sources.history.of(resource)],
        "watched_since": sources.history.since or None,
        "heard": receiver.received(resource)[:MAX_LOCK_EVENTS] if receiver else [],
        "listening_since": receiver.since if receiver else None,
        "workers": {**reports, "rows": workers},
    }


def waiters(ask: Ask) -> dict[str, Any]:
    """Show the number of waiters for each key, and the tasks that the workers report as waiting."""
    seen = ask.sources.nodes()
    reports = ask.sources.workers(WAITERS_PATIENCE_S)
    parked = ask.sources.parked()
    _rows, queues = ask.sources.rows(seen, parked)
    replies = reports.pop("rows")
    reported = _reported(replies)
    lines = [
        {
            **row,
            "unreported": None
            if parked is None
            else max(0, row["waiting"] - reported[row["resource"]]),
        }
        for row in queues
        if row["waiting"] and matches(row, ask.query)
    ]
    waits = [
        {"worker": one["worker"], **row}
        for one in replies
        for row in one["waits"]
        if matches(row, ask.query)
    ]
    waits.sort(key=lambda row: -(row["waited"] or 0.0))
    answered = [one["worker"] for one in replies if not one["error"]]
    without = [{k: one[k] for k in ("worker", "error")} for one in replies if one["error"]]
    return {
        **ask.sources.looked(seen),
        "query": ask.query,
        "lines": page_of(sorted(lines, key=SORTS["waiting"]), ask.page),
        "parked_known": parked is not None,
        "workers": {**reports, "answered": answered, "without": without},
        "waits": page_of(waits, ask.page),
    }


def _reported(replies: Iterable[dict[str, Any]]) -> Counter[str]:
    """Return how many waiting tasks the workers report for each resource."""
    return Counter(name for one in replies for row in one["waits"] for name in waited_for(row))


def nodes(ask: Ask) -> dict[str, Any]:
    """Show the nodes: their answers and votes, the number of locks on each, and their faults."""
    seen = ask.sources.nodes()
    rows, _queues = ask.sources.rows(seen)
    history, health = ask.sources.history, ask.sources.health
    past = history.of_nodes()
    facts = ask.sources.looked(seen)
    fresh = seen.error is None
    for number, node in enumerate(facts["nodes"]):
        votes = [(row["votes"][number], row["held"]) for row in rows] if fresh else []
        missing = sum(held and vote in ("none", "other") for vote, held in votes)
        node["keys"] = sum(vote == "has" for vote, _held in votes) if fresh else None
        node["missing"] = missing if fresh and node["reachable"] else None
        node["timeline"] = [vars(it) for it in past.get(node["name"], [])]
    return {
        **facts,
        "quorum": quorum_of(len(facts["nodes"])),
        "findings": health.findings if health is not None else [],
        "not_checked": list(NOT_CHECKED),
        "watched_since": history.since or None,
    }


def events(ask: Ask) -> dict[str, Any]:
    """Show the tasks that had to wait or have lost their lock, from the workers' events."""
    ask.sources.nodes()
    receiver = ask.sources.receiver
    show = ask.one_of("show", "all", "waiting", "lost")
    found = [
        one
        for one in (receiver.received() if receiver else [])
        if show in ("all", one["what"]) and matches(one, ask.query)
    ]
    return {
        "no_quorum": ask.sources.no_quorum,
        "asked": receiver is not None,
        "listening_since": receiver.since if receiver else None,
        "failure": (receiver.error or None) if receiver else None,
        "heard": receiver.count if receiver else 0,
        "query": ask.query,
        "show": show,
        **page_of(found, ask.page),
    }
