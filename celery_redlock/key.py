"""From a task's name, signature and arguments to the name of the resource it locks.

A key is text in a small prefix-free grammar, so that two keys are equal only if the arguments are:
every value is written in one canonical form whose end can be read off, whatever surrounds it. Plain
words and numbers stand bare (`account:42`, `lang=en`); a string that could be taken for anything
else is quoted (`"42"`, `"a:b"`), with everything but printable ASCII, and `"`, `%` and `#`,
percent-encoded. The producer's arguments, the worker's decoded ones and the body's must give one
key, so what a round trip through kombu's JSON folds together is folded together here, and so are
two spellings of one value. These are *one* key:

- tuples, lists, named tuples; sets and frozensets; bytes and bytearray; dicts in any order;
- dict keys and the strings JSON makes of them (`{1: 2}` and `{"1": 2}`; the last one wins);
- subclasses of str, int and float (`StrEnum`, `IntEnum`) and the plain value;
- an object with kombu's `__json__` method and what that returns;
- datetimes of one instant in two zones, decimals of one number (`1.0`, `1.00`), `0.0` and `-0.0`,
  all NaNs; dataclasses that differ only in fields with `compare=False`;
- for a parameter annotated with a pydantic model (or `Optional` of one) the model and a dict that
  validates to it, with defaults filled in. (A default that differs from call to call, such as a
  `default_factory=uuid4`, makes a key that differs from call to call.)

All else is two keys: `1`, `1.0`, `True` and `"1"`; a UUID, date or decimal and its text; an Enum
without a str or int in it and its value; a model or dataclass and a dict.

A template's text is a namespace of its own, without the task's name: two tasks with the template
`order:{order_id}` share their locks, which is how two tasks exclude each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import decimal
import enum
import inspect
import itertools
import json
import re
import string
import types
import typing
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from urllib.parse import quote, quote_from_bytes

from .errors import ConfigurationError

__all__ = ["KeyMaker", "canonical", "check_template"]

MAX_BYTES = 200
"""Keys over this many bytes become a readable head, `#`, and a digest of the whole."""
MAX_DEPTH = 100
"""Deeper nesting is refused; so is, thereby, a structure that contains itself."""

_DIGEST_BYTES = 16
_HEAD = MAX_BYTES - 1 - 2 * _DIGEST_BYTES
# Strings that may stand bare: they look like no number and no word of another type.
_BARE = re.compile(
    r"(?!(?:-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|true|false|null|nan|-?inf)\Z)[A-Za-z0-9_.-]+\Z", re.A
).match
# What may stand raw in a quoted string (letters, digits and "_.-~" always do), and in a template.
_RAW = " !$&'()*+,/:;<=>?@[\\]^`{|}"
_RAW_LITERAL = _RAW + '"'
# A bare value, or the name of a type, ends before any other character than these.
_TOKEN = frozenset(string.ascii_letters + string.digits + "_.-~%+")


class _CannotKey(Exception):
    """A value has no canonical form; the text says why, without showing the value."""


def _escape(text: str, raw: str = "") -> str:
    try:
        return quote(text, safe=raw, errors="strict")
    except UnicodeEncodeError:
        # JSON joins two surrogates that are a pair; a lone one stays as it is.
        paired = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        return quote(paired, safe=raw, errors="surrogatepass")


def _str(value: str, depth: int = 0) -> str:
    return value if _BARE(value) else f'"{_escape(value, _RAW)}"'


def _int(value: int, depth: int = 0) -> str:
    try:
        return int.__repr__(value)
    except ValueError:  # Python prints no integers of many thousands of digits, except so
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
    return f"[{','.join([_text(item, depth + 1) for item in value])}]"


def _set(value: Iterable[object], depth: int) -> str:
    return f"set({','.join(sorted([_text(item, depth + 1) for item in value]))})"


def _dict(value: Mapping[object, object], depth: int) -> str:
    texts = {_dict_key(key, depth + 1): _text(item, depth + 1) for key, item in value.items()}
    return f"{{{','.join([f'{key}:{texts[key]}' for key in sorted(texts)])}}}"


def _dict_key(key: object, depth: int) -> str:
    if isinstance(key, int) and not isinstance(key, bool):
        return _str(_int(key))
    if key is None or isinstance(key, (bool, float)):
        return _str(json.dumps(key))
    return _text(key, depth)


def _enum(value: enum.Enum, depth: int) -> str:
    # Combinations of flags have no name of their own in every Python.
    flag = isinstance(value, enum.Flag)
    return f"{_type(value)}({_text(value.value, depth) if flag else _escape(value.name)})"


def _type(value: object) -> str:
    return _escape(f"{type(value).__module__}.{type(value).__qualname__}")


# In the order in which json and then kombu's encoder look at a value: a datetime is a date, and an
# Enum with a str in it is a str. Only pickle knows the last three.
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
_NATIVE = (str, int, float, list, tuple, dict)  # json writes these without asking kombu
_SCALARS: dict[type, Callable[[typing.Any, int], str]] = {
    str: _str,
    int: _int,
    float: _float,
    bool: lambda value, depth: "true" if value else "false",
    type(None): lambda value, depth: "null",
}
_EXACT = {**_FORMS, **_SCALARS}


def _text(value: object, depth: int) -> str:
    if depth > MAX_DEPTH:
        raise _CannotKey(f"is nested deeper than {MAX_DEPTH} levels, or contains itself")
    kind = type(value)
    exact = _EXACT.get(kind)
    if exact is not None:
        return exact(value, depth)
    if hasattr(kind, "__json__") and not isinstance(value, _NATIVE):
        return _text(typing.cast(typing.Any, value).__json__(), depth + 1)
    for base, form in _FORMS.items():
        if isinstance(value, base):
            return form(value, depth)
    if _is_model(kind):
        names = list(typing.cast(typing.Any, kind).model_fields)
        extra = dict(sorted((getattr(value, "model_extra", None) or {}).items()))
    elif dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind) if field.compare]
        extra = {}
    else:
        raise _CannotKey(f"holds a {kind.__module__}.{kind.__qualname__}, which has no stable text")
    pairs = {**{name: getattr(value, name) for name in names}, **extra}
    texts = [f"{_escape(name)}={_text(item, depth + 1)}" for name, item in pairs.items()]
    return f"{_type(value)}({','.join(texts)})"


def _is_model(kind: object) -> bool:
    return (
        isinstance(kind, type) and hasattr(kind, "model_validate") and hasattr(kind, "model_fields")
    )


def canonical(value: object) -> str:
    """Return the one text of a value: printable ASCII, equal only for values that are one key.

    Raises:
        ConfigurationError: The value, or one in it, has no stable text (an open file, a lambda).
    """
    try:
        return _text(value, 0)
    except _CannotKey as error:
        raise ConfigurationError(f"the value {error}, so it cannot be part of a lock key") from None


_PIECES = re.compile(r"(\{\{|\}\}|<<|>>)|\{([^{}<>]*)\}|<([^{}<>]*)>|([{}<>])|([^{}<>]+)")


def check_template(template: str, names: Collection[str]) -> list[tuple[str, str | None]]:
    """Split a template into pairs of literal text and the name that follows it (None at the end).

    `{name}` and `<name>` insert an argument; `{{`, `}}`, `<<`, `>>` are the characters themselves.

    Args:
        template: The template as the user wrote it.
        names: The names it may use.

    Raises:
        ConfigurationError: It is empty, has a broken bracket, or holds anything but known names.
    """

    def refuse(why: str) -> ConfigurationError:
        return ConfigurationError(f"lock key template {template!a}: {why}")

    if not isinstance(template, str):
        raise refuse(f"must be a str, not {type(template).__name__}")
    if not template.strip():
        raise refuse("is empty; name what is locked, such as 'order:{order_id}'")
    known = ", ".join(names) or "none, since the function takes no arguments"
    plan: list[tuple[str, str | None]] = []
    literal = ""
    for found in _PIECES.finditer(template):
        doubled, braced, angled, broken, text = found.groups()
        if doubled or text:
            literal += doubled[0] if doubled else text
            continue
        if broken:
            raise refuse(f"unbalanced {broken!r} at {found.start()}; write it twice to mean itself")
        name = angled if braced is None else braced
        if not name:
            raise refuse(f"{found[0]!r} inserts nothing; give the name of an argument: {known}")
        if name not in names:
            if not name.isidentifier():
                raise refuse(
                    f"{found[0]!a} must hold only the name of an argument, without attribute,"
                    f" index, conversion or format; the names are: {known}"
                )
            raise refuse(f"unknown name {name!a}; the names are: {known}")
        plan.append((literal, name))
        literal = ""
    plan.append((literal, None))
    return plan


def _stop(after: str, following: str | None) -> str | None:
    """What, found in a value before the literal `after`, puts the value into parentheses.

    Without it one could not tell where the value ends. None where any value's end is plain; "",
    which is in every value, where another value follows at once.
    """
    if not after:
        return None if following is None else ""
    if after[0] == "(":  # would read as going on after a type's name
        return ""
    return after[0] if after[0] in _TOKEN else None


class KeyMaker:
    """Makes the resource name for a call. Checked at construction, immutable, safe in threads.

    Args:
        task_name: The task's name; it starts a key without a template.
        function: The user's function; wrapped ones are seen through as `inspect.signature` does.
        template: Such as `order:{order_id}`; None for the task's name and all its arguments.
            `*args` and `**kwargs` are named like the others, a list and a dict.
        bound: The function's first parameter is the task itself: not part of any call or key.

    Raises:
        ConfigurationError: The template cannot work, or a default cannot be part of a key.
    """

    def __init__(
        self,
        task_name: str,
        function: Callable[..., object],
        template: str | None = None,
        *,
        bound: bool = False,
    ) -> None:
        self._task_name = task_name
        self._signature = signature = _signature(task_name, function, bound)
        self._globals = getattr(inspect.unwrap(function), "__globals__", {})
        self._models: dict[str, typing.Any] = {}
        parameters = signature.parameters
        pairs: list[tuple[str, str | None]]
        if template is None:
            pairs = [*((f",{_escape(name)}=", name) for name in parameters), (")", None)]
            pairs[0] = (_escape(task_name, "/:@ ") + "(" + pairs[0][0].lstrip(","), pairs[0][1])
        else:
            pairs = [
                (_escape(literal, _RAW_LITERAL), name)
                for literal, name in check_template(template, parameters)
            ]
        self._tail = pairs[-1][0]
        self._plan = tuple(
            (literal, name, _stop(after, following))
            for (literal, name), (after, following) in itertools.pairwise(pairs)
            if name is not None
        )
        kinds = {parameter.kind for parameter in parameters.values()}
        by_place = inspect.Parameter.POSITIONAL_OR_KEYWORD
        # Only signatures without "/", "*args" and "**kwargs" are bound by hand.
        self._simple = kinds <= {by_place, inspect.Parameter.KEYWORD_ONLY}
        self._names = frozenset(parameters)
        self._places = tuple(name for name, p in parameters.items() if p.kind is by_place)
        self._defaults = {
            name: p.default for name, p in parameters.items() if p.default is not p.empty
        }
        for _, name, _ in self._plan:
            try:
                _text(self._defaults.get(name), 0)
            except _CannotKey as error:
                raise self._refusal(f"the default of argument {name!a}", error) from None

    def __call__(self, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
        """Return the resource name for a call.

        Args:
            args: Positional arguments, without the task itself.
            kwargs: Keyword arguments.

        Raises:
            TypeError: The arguments do not fit the signature.
            ConfigurationError: An argument that is part of the key has no stable text.
        """
        values = self._bind(args, kwargs)
        key = ""
        for literal, name, stop in self._plan:
            value = values[name]
            scalar = _SCALARS.get(type(value))
            text = self._argument(name, value) if scalar is None else scalar(value, 0)
            if stop is not None and stop in text:
                text = f"({text})"
            key += literal + text
        key += self._tail
        if len(key) <= MAX_BYTES:  # all of it is ASCII
            return key
        digest = blake2b(key.encode("ascii"), digest_size=_DIGEST_BYTES).hexdigest()
        return f"{key[:_HEAD]}#{digest}"

    def _bind(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Mapping[str, object]:
        if self._simple and len(args) <= len(self._places):
            values = dict(zip(self._places, args, strict=False))
            if not kwargs or values.keys().isdisjoint(kwargs):
                values.update(kwargs)
                if values.keys() == self._names:
                    return values
                values = {**self._defaults, **values}
                if values.keys() == self._names:
                    return values
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def _argument(self, name: str, value: object) -> str:
        if isinstance(value, Mapping):
            value = self._as_model(name, value)
        try:
            return _text(value, 0)
        except _CannotKey as error:
            raise self._refusal(f"argument {name!a}", error) from None

    def _refusal(self, what: str, error: _CannotKey) -> ConfigurationError:
        return ConfigurationError(
            f"{what} of {self._task_name} {error}, so it cannot be part of a lock key. Give the"
            " task a lock_key that names only other arguments, such as 'order:{order_id}'."
        )

    def _as_model(self, name: str, value: Mapping[typing.Any, object]) -> object:
        if name not in self._models:  # resolved late: the annotation may name a class further down
            self._models[name] = _model_of(self._signature.parameters[name], self._globals)
        model = self._models[name]
        if model is None:
            return value
        try:
            return model.model_validate(value)
        except Exception:
            return value  # whether the task accepts it is for the task to say, not for its lock


def _model_of(parameter: inspect.Parameter, names: dict[str, object]) -> typing.Any:
    """The pydantic model a parameter is annotated with, as Celery's `pydantic=True` sees it."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return None
    try:
        holder = types.SimpleNamespace(__annotations__={"it": parameter.annotation})
        hint = typing.get_type_hints(holder, names)["it"]
    except Exception:  # such as a name imported only for type checkers
        return None
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hints = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        hint = hints[0] if len(hints) == 1 else None
    return hint if _is_model(hint) else None


def _signature(task_name: str, function: Callable[..., object], bound: bool) -> inspect.Signature:
    signature = inspect.signature(function)
    if not bound:
        return signature
    first, *others = signature.parameters.values() or (None,)
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        raise ConfigurationError(
            f"{task_name} is bound (bind=True), so its function needs a first parameter: self"
        )
    if first.kind is first.VAR_POSITIONAL:  # "*args" takes the task in, and stays
        return signature
    return signature.replace(parameters=others)
