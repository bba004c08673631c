"""The tables: every way in which a locked task can be published, and the result of each.

A cell of `CELLS` has one locked task, `t`, among plain ones, `p`; another may hold its key. A cell
of `SELVES` has several of one key. What comes out is written as the tasks write it (`tasks.py`):
`{t}` stands for the result of the locked one: its own words if it ran, `~` if it was skipped.
"""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from celery import chain, chord, group


class Maker(Protocol):
    """Makes the signatures of one cell: its key and its policy are chosen already."""

    app: Any
    task: Any
    key: str
    soon: float
    """Seconds to a message's ETA."""

    def t(self, own: str = "a", **more: Any) -> Any:
        """Return the signature of the locked task."""

    def p(self, own: str) -> Any:
        """Return the signature of a plain task."""

    def replaced(self, by: Any) -> Any:
        """A task that another replaces when it runs."""


Publish = Callable[[Maker], Any]


@dataclass(frozen=True)
class Cell:
    """One way to publish a task.

    Attributes:
        name: What it is.
        publish: Publishes; returns the result to wait for.
        comes: What comes out.
        ran: What the locked one returns if it runs.
        lone: Whether it is published alone: `on_duplicate` decides at once.
        eager: Whether there is such a thing in eager mode. (Celery's own `replace` fails there: it
            waits for a result inside a task.)
    """

    name: str
    publish: Publish
    comes: str = "{t}"
    ran: str = "a"
    lone: bool = False
    eager: bool = True


def lone(name: str, **options: Any) -> Cell:
    return Cell(f"lone call {name}".strip(), lambda m: m.t().apply_async(**options), lone=True)


def sent(signature: Any, **options: Any) -> Any:
    return signature.apply_async(**options)


def of(app: Any, signature: Any) -> Any:
    """A chain that is a chord alone asks the chord for its app, which has none of its own.

    Then it takes the current one, which ours is not. Celery 5.7 finds it in the chord's tasks.
    """
    signature._app = app
    return signature


def linked(first: Any, then: Any) -> Any:
    """Return the result of a callback, which is not called where the first task fails."""
    callback = then.clone()
    result = callback.freeze()
    result.parent = first.apply_async(link=callback)
    return result


def in_seconds(seconds: float) -> datetime.datetime:
    # A little more, or less than a whole second is left of it when it is published.
    return datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=seconds + 0.1)


CELLS = (
    lone(""),
    Cell("lone call task_id", lambda m: sent(m.t(), task_id=str(uuid.uuid4())), lone=True),
    Cell("lone call countdown", lambda m: sent(m.t(), countdown=m.soon), lone=True),
    Cell("lone call eta", lambda m: sent(m.t(), eta=in_seconds(m.soon)), lone=True),
    lone("expires", expires=60),
    Cell(
        "send_task",
        lambda m: m.app.send_task(m.task.name, kwargs={"key": m.key}),
        eager=False,  # it knows no tasks, so it runs none
    ),
    Cell("group", lambda m: sent(group(m.t(), m.p("q"))), "{t},q"),
    Cell("group of one", lambda m: sent(group([m.t()])), "{t}"),
    Cell("group countdown", lambda m: sent(group(m.t().set(countdown=m.soon), m.p("q"))), "{t},q"),
    Cell("chord header", lambda m: sent(chord([m.t(), m.p("q")], m.p("z"))), "z({t},q)"),
    Cell("chord header of one", lambda m: sent(chord([m.t()], m.p("z"))), "z({t})"),
    Cell("chord body", lambda m: sent(chord([m.p("p"), m.p("q")], m.t())), ran="a(p,q)"),
    Cell("chain head", lambda m: sent(chain(m.t(), m.p("z"))), "z({t})"),
    Cell("chain middle", lambda m: sent(chain(m.p("p"), m.t(), m.p("z"))), "z({t})", ran="a(p)"),
    Cell("chain tail", lambda m: sent(chain(m.p("p"), m.t())), ran="a(p)"),
    Cell("chain head task_id",
         lambda m: sent(chain(m.t().set(task_id=str(uuid.uuid4())), m.p("z"))), "z({t})"),
    Cell("chain middle eta",
         lambda m: sent(chain(m.p("p"), m.t().set(eta=in_seconds(m.soon)), m.p("z"))), "z({t})",
         ran="a(p)"),
    Cell("chain tail expires", lambda m: sent(chain(m.p("p"), m.t().set(expires=60))), ran="a(p)"),
    Cell("link", lambda m: linked(m.p("p"), m.t()), ran="a(p)"),
    Cell("linked to", lambda m: linked(m.t(), m.p("z")), "z({t})"),
    Cell("group in chain", lambda m: sent(chain(m.p("p"), group(m.t(), m.p("q")), m.p("z"))),
         "z({t},q(p))", ran="a(p)"),
    Cell("chain in group", lambda m: sent(group(chain(m.p("p"), m.t()), m.p("q"))), "{t},q",
         ran="a(p)"),
    Cell("chain in group in chord",
         lambda m: sent(chord([group([chain(m.p("p"), m.t(), m.p("r"))])], m.p("z"))), "z(r({t}))",
         ran="a(p)"),
    Cell("chain in chord header",
         lambda m: sent(chord([chain(m.p("p"), m.t(), m.p("r")), m.p("q")], m.p("z"))),
         "z(r({t}),q)", ran="a(p)"),
    Cell("chord in chain",
         lambda m: sent(chain(m.p("p"), chord([m.t(), m.p("q")], m.p("y")), m.p("z"))),
         "z(y({t},q(p)))", ran="a(p)"),
    Cell("chord in chord header",
         lambda m: sent(chord([chord([m.t(), m.p("q")], m.p("y")), m.p("r")], m.p("z"))),
         "z(y({t},q),r)"),
    Cell("chord body in chain",
         lambda m: sent(of(m.app, chain(chord([m.p("p"), m.p("q")], m.t()), m.p("z")))), "z({t})",
         ran="a(p,q)"),
    Cell("replace", lambda m: sent(m.replaced(m.t())), eager=False),
    Cell("replace in chain", lambda m: sent(chain(m.p("p"), m.replaced(m.t()), m.p("z"))), "z({t})",
         ran="a(p)", eager=False),
    Cell("replace in chord header", lambda m: sent(chord([m.replaced(m.t()), m.p("q")], m.p("z"))),
         "z({t},q)", eager=False),
    Cell("replace by chain", lambda m: sent(m.replaced(chain(m.p("p"), m.t(), m.p("z")))), "z({t})",
         ran="a(p)", eager=False),
)  # fmt: skip


@dataclass(frozen=True)
class Self:
    """A canvas with duplicates of its own.

    Attributes:
        name: What it is.
        publish: Publishes; returns the result to wait for.
        comes: What comes out.
        ran: What each returns if it runs.
        stages: Which of them are on their way side by side, and which after those.
        one: Whether all are one task, with one reservation: what takes a task's place.
    """

    name: str
    publish: Publish
    comes: str
    ran: Mapping[str, str]
    stages: tuple[str, ...]
    one: bool = False


SELVES = (
    Self("group of two", lambda m: sent(group(m.t("a"), m.t("b"))), "{a},{b}", {"a": "a", "b": "b"},
         ("ab",)),
    Self("chord header of two", lambda m: sent(chord([m.t("a"), m.t("b"), m.p("q")], m.p("z"))),
         "z({a},{b},q)", {"a": "a", "b": "b"}, ("ab",)),
    Self("chord body as its header", lambda m: sent(chord([m.t("a"), m.p("q")], m.t("b"))), "{b}",
         {"a": "a", "b": "b({a},q)"}, ("a", "b")),
    Self("chord body as its header of one", lambda m: sent(chord([m.t("a")], m.t("b"))), "{b}",
         {"a": "a", "b": "b({a})"}, ("a", "b")),
    Self("chain of two", lambda m: sent(chain(m.t("a"), m.t("b"), m.p("z"))), "z({b})",
         {"a": "a", "b": "b({a})"}, ("a", "b")),
    Self("chain of three", lambda m: sent(chain(m.t("a"), m.t("b"), m.t("c"))), "{c}",
         {"a": "a", "b": "b({a})", "c": "c({b})"}, ("a", "b", "c")),
    Self("link to itself", lambda m: linked(m.t("a"), m.t("b")), "{b}", {"a": "a", "b": "b({a})"},
         ("a", "b")),
    Self("chains in chord header",
         lambda m: sent(chord([chain(m.p("p"), m.t("a")), chain(m.p("q"), m.t("b"))], m.p("z"))),
         "z({a},{b})", {"a": "a(p)", "b": "b(q)"}, ("ab",)),
    Self("group in chain after its like",
         lambda m: sent(chain(m.t("a"), group(m.t("b"), m.t("c")), m.p("z"))), "z({b},{c})",
         {"a": "a", "b": "b({a})", "c": "c({a})"}, ("a", "bc")),
    Self("chord in chain after its like",
         lambda m: sent(chain(m.t("a"), chord([m.t("b"), m.p("q")], m.t("c")))), "{c}",
         {"a": "a", "b": "b({a})", "c": "c({b},q({a}))"}, ("a", "b", "c")),
    Self("replaced by its like", lambda m: sent(m.t("a", becomes=m.t("b"))), "{b}",
         {"a": "a", "b": "b"}, ("a", "b"), one=True),
    Self("replaced by its like in a chord header",
         lambda m: sent(chord([m.t("a", becomes=m.t("b")), m.p("q")], m.p("z"))), "z({b},q)",
         {"a": "a", "b": "b"}, ("a", "b"), one=True),
)  # fmt: skip
