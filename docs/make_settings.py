"""Write the entries of the options into settings.md, from the tables the code itself uses.

python docs/make_settings.py
"""

from __future__ import annotations

import collections.abc
import json
import re
import sys
import textwrap
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

PAGE = Path(__file__).with_name("settings.md")
sys.path.insert(0, str(PAGE.parents[1]))

from celery_redlock import Redlock  # noqa: E402
from celery_redlock.config.options import (  # noqa: E402
    GLOBAL,
    TASK,
    Option,
    Settings,
    TaskOptions,
)
from celery_redlock.config.task_lock import PER_CALL  # noqa: E402

BEGIN = "<!-- options: written by docs/make_settings.py from celery_redlock/config/options.py -->\n"
END = "<!-- options: end -->\n"
WIDTH = 108
"""Columns of a line at most."""
TYPES = {**get_type_hints(Settings), **get_type_hints(TaskOptions)}
TOO_LARGE = 1e12
"""More seconds than any option takes."""


def entries() -> str:
    """Return all options as Markdown: those of an app, then of a task; a heading for each."""
    parts = ["## Settings of the app\n", _links("redlock_", GLOBAL)]
    parts += [_of_app(name, option) for name, option in GLOBAL.items()]
    parts += ["## Options of a task\n", _links("lock_", TASK)]
    parts += [_of_task(name, option) for name, option in TASK.items()]
    return "\n".join(parts)


def render(page: str) -> str:
    """Return the page with the present entries in their place."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{entries()}\n{END}{tail}"


def _links(prefix: str, names: Iterable[str]) -> str:
    links = [f"[`{prefix}{name}`](#{prefix}{name})" for name in names]
    return _wrapped(" ·\n".join(links)) + "\n"


def _of_app(name: str, option: Option) -> str:
    places = [f"`redlock_{name}` in the app's settings"]
    if name in (Redlock.__init__.__kwdefaults__ or {}) or name == "nodes":
        places.append(f"`{name}` of a `Redlock`")
    if name in TASK:
        places.append(f"for one task, [`lock_{name}`](#lock_{name})")
    facts = [_type(name, option), f"Default: `{_shown(option)}`"]
    return _entry(f"redlock_{name}", [option.about, option.change], [*facts, _where(places)])


def _of_task(name: str, option: Option) -> str:
    places = [f"`lock_{name}` on a `SingletonTask`", f"`{name}` in `@locked`"]
    if name in PER_CALL:
        places.append(f'for one call, `lock={{"{name}": ...}}` in `apply_async`')
    texts, default = [option.about, option.change], f"Default: `{_shown(option)}`"
    if name in GLOBAL:
        texts = [f"The same as [`redlock_{name}`](#redlock_{name}), for this task alone."]
        default = f"Default: the app's `redlock_{name}`; if that is not set, `{_shown(option)}`"
    if name == "wait":
        default = "Default: by the policy, as said there"
    return _entry(f"lock_{name}", texts, [_type(name, option), default, _where(places)])


def _entry(heading: str, texts: list[str], facts: list[str]) -> str:
    if len(texts) > 1:
        texts[1] = f"**When to change it.** {texts[1]}"
    paragraphs = [_wrapped(text) + "\n" for text in texts]
    return "\n".join(
        [f"### `{heading}`\n", *paragraphs, *(_wrapped(f"- {f}", "  ") for f in facts), ""]
    )


def _shown(option: Option) -> str:
    default = option.default
    return json.dumps(default) if isinstance(default, str) else repr(default)


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _where(places: list[str]) -> str:
    return f"Set it as: {'; '.join(places)}"


def _type(name: str, option: Option) -> str:
    """Return the type, the unit and the allowed values."""
    text = f"Type: {_named(TYPES[name])}"
    wrong = _refusal(option, object())
    if bounds := re.match(r"must be a number of seconds (>=?) ([\d.]+)", wrong):
        text += f", in seconds, {'at least' if bounds[1] == '>=' else 'more than'} {bounds[2]}"
        most = re.match(r"must be at most (\d+)", _refusal(option, TOO_LARGE))
        text += f" and at most {most[1]}" if most else ""
    elif wrong.startswith("must be ") and name != "key":
        text += f". Allowed: {_quoted(wrong.removeprefix('must be '))}"
    return text


def _quoted(text: str) -> str:
    """Return the text with each value written as code."""
    return re.sub(
        r"'(\w+)'|\b(True|False|None)\b", lambda m: f'`"{m[1]}"`' if m[1] else f"`{m[2]}`", text
    )


def _refusal(option: Option, value: Any) -> str:
    """Return the error of an option's check for a value; empty if the value is valid."""
    try:
        option.check(value)
    except ValueError as error:
        return str(error)
    return ""


def _named(kind: Any) -> str:
    """Return a type as readers expect it."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_named, inside)))
    if origin is Literal:
        return "`str`"
    if origin is collections.abc.Callable:
        return "function"
    if origin is collections.abc.Sequence:
        return "`str` or list of `str`" if inside == (str,) else "list or `None`"
    return "`None`" if kind is type(None) else f"`{kind.__name__}`"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
