"""Values that keys may not tell apart, by the rules of docs/algorithm.md, for comparison."""

from __future__ import annotations

import datetime
from typing import Any

from kombu.utils import json

from celery_redlock.keys.resolver import keys_of


def key_of(task_name: str, function: Any, template: str | None = None, **options: Any) -> Any:
    """Return a function that makes the one key of a call."""
    keys = keys_of(task_name, function, template, **options)

    def key(args: Any, kwargs: Any) -> str:
        (made,) = keys(args, kwargs)
        return made

    return key


def joined(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def fold(value: object) -> object:
    """The value, with what the documentation calls one key made equal, and nothing else."""
    if value is None or isinstance(value, (bool, int)):
        return type(value).__name__, value
    if isinstance(value, float):
        return "float", repr(value + 0.0)
    if isinstance(value, str):
        return "str", joined(value)
    if isinstance(value, (list, tuple)):
        return "list", tuple(fold(item) for item in value)
    if isinstance(value, dict):
        return "dict", frozenset({fold_key(k): fold(v) for k, v in value.items()}.items())
    if isinstance(value, (set, frozenset)):
        return "set", frozenset(fold(item) for item in value)
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        try:
            return "datetime", value.astimezone(datetime.timezone.utc).isoformat()
        except OverflowError:
            return "datetime", value.isoformat()
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return type(value).__name__, value.isoformat()
    return type(value).__name__, value


def fold_key(key: object) -> object:
    if key is None or isinstance(key, (bool, int, float)):
        return "str", next(iter(json.loads(json.dumps({key: 0}))))
    return fold(key)
