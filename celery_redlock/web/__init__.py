"""Web dashboard: what is held, what waits, how the nodes vote, what went wrong lately.

`celery redlock web` serves it on loopback; `make_app()` makes the WSGI app for your own site.
Whatever is in here needs `pip install "celery-redlock[web]"`.
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
        app: The Celery app: its settings name the nodes, its workers tell what waits, its events
            what went wrong.
        redlock: The lock whose nodes are shown, where there is no app.
        token: What an operator must know to free a lock, at least 16 characters; None: the page is
            for reading only.
        hosts: Names under which the page may be asked for, as `["ops.example.org"]`; a leading dot
            stands for all names below, "*" for any. Those of this machine's loopback if None.
        private: Whether reading needs the token as well.
        user: Takes the WSGI environ of a request and returns the name of the user who sent it: the
            log line about a freed lock bears it. None: that line has the address alone.
        idle: Seconds between two looks at the nodes without a reader; None: no looks then.
        rest: Seconds without a reader after which it no longer looks; None: it always does.

    Raises:
        ConfigurationError: The extra is not installed, or one of these cannot work.
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
