"""Web dashboard: locks, waiters, the nodes' votes, and recent trouble.

`celery redlock web` serves it on loopback; `make_app()` returns the WSGI app for your own site.
All of this package needs `pip install "celery-redlock[web]"`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..protocol.errors import ConfigurationError

if TYPE_CHECKING:
    from ..locking.redlock import Redlock
    from .wsgi import Page

__all__ = ["make_app"]


def make_app(
    app: Any = None,
    *,
    redlock: Redlock | None = None,
    token: str | None = None,
    hosts: Sequence[str] | None = None,
    private: bool = False,
    user: Callable[[dict[str, Any]], str | None] | None = None,
    idle: float | None = 5.0,
    rest: float | None = 600.0,
) -> Page:
    """Return the web dashboard as a WSGI app. Nodes, workers and broker are asked on first use.

    Args:
        app: The Celery app. Its settings name the nodes, its workers report what waits, its events
            report what went wrong.
        redlock: The lock whose nodes are shown, if there is no app.
        token: The secret with which an operator can free a lock, at least 16 characters; None: the
            page is for reading only.
        hosts: Host names under which the page is served, such as `["ops.example.org"]`; a leading
            dot stands for all names below, "*" for any. If None, the names of loopback.
        private: True if reading needs the token as well.
        user: Function that takes the WSGI environ of a request and returns the name of the user who
            sent it, for the log line about a freed lock. None: that line has the address alone.
        idle: Seconds between two surveys while nobody reads the page; None: no surveys then.
        rest: Seconds without a reader after which the surveys stop; None: they never stop.

    Raises:
        ConfigurationError: The extra is not installed, or an argument is invalid.
    """
    try:
        from .auth import Door
        from .serve import LOOPBACK
        from .sources import Sources
        from .wsgi import Page
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("jinja2", "markupsafe", "werkzeug"):
            raise
        raise ConfigurationError(
            f'the web dashboard needs {error.name}: pip install "celery-redlock[web]"'
        ) from None
    if (app is None) == (redlock is None):
        raise ConfigurationError("give make_app an app or a redlock: one of the two")
    if redlock is None:
        from ..locking.redlock import Redlock

        redlock = Redlock.from_app(app)
    door = Door(token, LOOPBACK if hosts is None else hosts, private, user)
    return Page(Sources(redlock, app, idle=idle, rest=rest), door)
