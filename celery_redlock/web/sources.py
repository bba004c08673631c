"""Where what is shown comes from: the nodes, the workers, the events; each with its bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..protocol.errors import QuorumUnavailable
from ..survey.snapshot import Survey, look_at, survey
from . import serializers
from .history import History
from .refresher import Fresh, Seen
from .workers import Hearing, ask

if TYPE_CHECKING:
    from ..locking.redlock import Redlock

__all__ = ["Sources"]

KINDS = ("lock", "reservation", "line", "foreign")
"""What of the nodes' keys is shown; marks and fences are many, and nobody waits for them."""
NODES_WAIT = 3.0
"""Seconds after which a node that has not told all counts as away, in a look at everything."""
ONE_WAIT = 1.0
"""The same, in a look at one lock."""
PAGE_WAIT = 1.5
"""Seconds that a page waits for a look; then it shows what was seen last, and when."""
WORKERS_WAIT = 1.0
"""Seconds that workers are waited for: always all of them, as nobody knows how many there are."""


class Sources:
    """What a page asks for what it shows.

    Args:
        redlock: Whose nodes.
        app: Whose workers and events; None: there are none to ask.
        idle: Seconds between two looks at the nodes while nobody reads.
        rest: Seconds without a reader after which it no longer looks.
    """

    def __init__(
        self, redlock: Redlock, app: Any, *, idle: float | None, rest: float | None
    ) -> None:
        self.redlock, self.app = redlock, app
        self.history = History()
        self._nodes = Fresh(
            lambda: survey(redlock, kinds=KINDS, timeout=NODES_WAIT),
            idle=idle,
            rest=rest,
            then=self._keep,
        )
        self._rows: tuple[int, list[dict[str, Any]]] = (-1, [])
        self._workers: Fresh[list[dict[str, Any]]] | None = None
        self.hearing: Hearing | None = None
        if app is not None:
            self._workers = Fresh(lambda: ask(app, WORKERS_WAIT), every=3.0)
            self.hearing = Hearing(app)

    def _keep(self, seen: Seen[Survey]) -> None:
        if seen.error is None and seen.what is not None:
            self.history.note(seen.what)
        elif seen.error is not None:
            self.history.blind(serializers.failure(seen.error))

    def nodes(self) -> Seen[Survey]:
        """All that lies on the nodes."""
        if self.hearing is not None:
            self.hearing.start()
        return self._nodes.get(PAGE_WAIT)

    def rows(self, seen: Seen[Survey]) -> list[dict[str, Any]]:
        """The entries of a look, as the pages show them; they are made once a look."""
        looks, rows = self._rows
        if looks != seen.looks:
            found = seen.what
            rows = [serializers.entry(it, found.looks) for it in found.entries] if found else []
            self._rows = (seen.looks, rows)
        return rows

    def one(self, resource: str) -> Survey | QuorumUnavailable:
        """All that is known of one lock, now; or why too little is."""
        try:
            return look_at(self.redlock, resource, ONE_WAIT)
        except QuorumUnavailable as error:
            return error

    def workers(self, patience: float = 0.0) -> Seen[list[dict[str, Any]]] | None:
        """What the workers told last; None: there is no app whose workers could be asked."""
        return None if self._workers is None else self._workers.get(patience)

    def close(self) -> None:
        """Look and listen no more."""
        self._nodes.close()
        if self._workers is not None:
            self._workers.close()
        if self.hearing is not None:
            self.hearing.close()
