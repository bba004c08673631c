"""The canonical text of a value: two values share it only if they should be one key.

Every value is written in a small prefix-free grammar: its end can be read off, whatever surrounds
it. Plain words and numbers stand bare (`42`, `en`). A string that could be taken for anything else
is quoted (`"42"`, `"a:b"`), with everything but printable ASCII, and `"`, `%` and `#`,
percent-encoded. The producer's arguments, the worker's decoded ones and the body's must give one
key. So values that a round trip through kombu's JSON makes equal are equal here, and so are two
spellings of one value. These are *one* key:

- tuples, lists, named tuples; sets and frozensets; bytes and bytearray; dicts in any order;
- dict keys and the strings that JSON makes of them (`{1: 2}` and `{"1": 2}`; the last one wins);
- subclasses of str, int and float (`StrEnum`, `IntEnum`) and the plain value;
- an object with kombu's `__json__` method and the value that this returns;
- datetimes of one instant in two zones, decimals of one number (`1.0`, `1.00`), `0.0` and `-0.0`,
  all NaNs; dataclasses that differ only in fields with `compare=False`;
- for a parameter annotated with a pydantic model (or `Optional` of one) the model and a dict that
  validates to it, with defaults filled in. (A default that differs from call to call, such as a
  `default_factory=uuid4`, makes a key that differs from call to call.)

All else is two keys: `1`, `1.0`, `True` and `"1"`; a UUID, date or decimal and its text; an Enum
without a str or int in it and its value; a model or dataclass and a dict.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import decimal
import enum
import json
import re
import string
import typing
import uuid
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import quote, quote_from_bytes

MAX_DEPTH = 100
"""Maximum nesting. The limit also refuses a structure that contains itself."""
MAX_VALUES = 500_000
"""Limit: what a megabyte of JSON holds; a worker's main process makes its key in a second."""

# Strings that may stand bare: they look like no number and no word of another type.
_BARE = re.compile(
    r"(?!(?:-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|true|false|null|nan|-?inf)\Z)[A-Za-z0-9_.-]+\Z", re.A
).match
# Characters that stand raw in a quoted string (besides letters, digits and "_.-~"), and in a
# template.
_RAW = " !$&'()*+,/:;<=>?@[\\]^`{|}"
RAW_LITERAL = _RAW + '"'
# A bare value, or the name of a type, ends before any character that is not one of these.
TOKEN = frozenset(string.ascii_letters + string.digits + "_.-~%+")


class CannotKey(Exception):
    """Error for a value without a canonical form. Its text gives the reason, not the value."""


def escape(text: str, raw: str = "") -> str:
    try:
        return quote(text, safe=raw, errors="strict")
    except UnicodeEncodeError:
        # JSON joins a pair of surrogates; a lone one stays as it is.
        paired = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        return quote(paired, safe=raw, errors="surrogatepass")


def _str(value: str, depth: int = 0) -> str:
    return value if _BARE(value) else f'"{escape(value, _RAW)}"'


def _int(value: int, depth: int = 0) -> str:
    try:
        return int.__repr__(value)
    except ValueError:  # Python refuses decimal text for integers of many thousands of digits
        return f"int({int.__format__(value, 'x')})"


def _float(value: float, depth: int = 0) -> str:
    return float.__repr__(float.__add__(value, 0.0))  # -0.0 + 0.0 is 0.0


def _datetime(value: datetime.datetime, depth: int) -> str:
    if value.utcoffset() is not None:
        # An instant outside the years 1 to 9999 of UTC stays as written.
        with contextlib.suppress(OverflowError):
            value = value.astimezone(datetime.timezone.utc)
    return f"datetime({datetime.datetime.isoformat(value)})"


def _decimal(value: decimal.Decimal, depth: int) -> str:
    if not value:
        return "Decimal(0)"
    if not value.is_finite():
        return f"Decimal({decimal.Decimal.__str__(value)})"
    # The ambient context would round.
    exact = decimal.Context(
        len(value.as_tuple().digits), Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX
    ).normalize(value)
    return f"Decimal({exact:f})" if abs(exact.adjusted()) < 30 else f"Decimal({exact})"


def _list(value: Iterable[object], depth: int) -> str:
    return f"[{','.join([text_of(item, depth + 1) for item in value])}]"


def _set(value: Iterable[object], depth: int) -> str:
    return f"set({','.join(sorted([text_of(item, depth + 1) for item in value]))})"


def _dict(value: Mapping[object, object], depth: int) -> str:
    texts = {_dict_key(key, depth + 1): text_of(item, depth + 1) for key, item in value.items()}
    return f"{{{','.join([f'{key}:{texts[key]}' for key in sorted(texts)])}}}"


def _dict_key(key: object, depth: int) -> str:
    if isinstance(key, int) and not isinstance(key, bool):
        return _str(_int(key))
    if key is None or isinstance(key, (bool, float)):
        return _str(json.dumps(key))
    return text_of(key, depth)


def _enum(value: enum.Enum, depth: int) -> str:
    # Combinations of flags have no name of their own in every Python.
    flag = isinstance(value, enum.Flag)
    return f"{_type(value)}({text_of(value.value, depth) if flag else escape(value.name)})"


def _type(value: object) -> str:
    return escape(f"{type(value).__module__}.{type(value).__qualname__}")


# In the order in which json and then kombu's encoder check a value: a datetime is a date, and an
# Enum with a str in it is a str. The last three pass only through pickle.
_FORMS: dict[type, Callable[[typing.Any, int], str]] = {
    str: lambda value, depth: _str(str.__str__(value)),
    int: _int,
    float: _float,
    list: _list,
    tuple: _list,
    dict: _dict,
    datetime.datetime: _datetime,
    datetime.date: lambda value, depth: f"date({datetime.date.isoformat(value)})",
    datetime.time: lambda value, depth: f"time({datetime.time.isoformat(value)})",
    decimal.Decimal: _decimal,
    uuid.UUID: lambda value, depth: f"UUID({uuid.UUID.__str__(value)})",
    bytes: lambda value, depth: f"bytes({quote_from_bytes(value, safe='')})",
    bytearray: lambda value, depth: f"bytes({quote_from_bytes(bytes(value), safe='')})",
    set: _set,
    frozenset: _set,
    enum.Enum: _enum,
}
_NATIVE = (str, int, float, list, tuple, dict)  # json writes these without calling kombu
SCALARS: dict[type, Callable[[typing.Any, int], str]] = {
    str: _str,
    int: _int,
    float: _float,
    bool: lambda value, depth: "true" if value else "false",
    type(None): lambda value, depth: "null",
}
_EXACT = {**_FORMS, **SCALARS}


def check_size(value: object) -> None:
    """Check that a value does not hold too many others, before its text is made.

    Raises:
        CannotKey: It holds too many.
    """
    left, level = MAX_VALUES, [value]
    for _ in range(MAX_DEPTH):
        inner: list[object] = []
        for each in level:
            if isinstance(each, (dict, list, tuple, set, frozenset)):
                left -= len(each) * (1 + isinstance(each, dict))
                if left < 0:
                    raise CannotKey(f"holds more than {MAX_VALUES} values, or contains itself")
                items = each.values() if isinstance(each, dict) else each
                inner += [item for item in items if type(item) not in SCALARS]
        level = inner
        if not level:
            return


def text_of(value: object, depth: int = 0) -> str:
    """Return the canonical text of a value that is nested in `depth` others: printable ASCII.

    Raises:
        CannotKey: The value, or one in it, has no stable text (an open file, a lambda).
    """
    if depth > MAX_DEPTH:
        raise CannotKey(f"is nested deeper than {MAX_DEPTH} levels, or contains itself")
    kind = type(value)
    exact = _EXACT.get(kind)
    if exact is not None:
        return exact(value, depth)
    if hasattr(kind, "__json__") and not isinstance(value, _NATIVE):
        return text_of(typing.cast(typing.Any, value).__json__(), depth + 1)
    for base, form in _FORMS.items():
        if isinstance(value, base):
            return form(value, depth)
    if is_model(kind):
        names = list(typing.cast(typing.Any, kind).model_fields)
        extra = dict(sorted((getattr(value, "model_extra", None) or {}).items()))
    elif dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind) if field.compare]
        extra = {}
    else:
        raise CannotKey(f"holds a {kind.__module__}.{kind.__qualname__}, which has no stable text")
    pairs = {**{name: getattr(value, name) for name in names}, **extra}
    texts = [f"{escape(name)}={text_of(item, depth + 1)}" for name, item in pairs.items()]
    return f"{_type(value)}({','.join(texts)})"


def is_model(kind: object) -> bool:
    return (
        isinstance(kind, type) and hasattr(kind, "model_validate") and hasattr(kind, "model_fields")
    )
