"""Pairs of calls: equal calls have equal keys, different calls have different ones.

What a call means is worked out by `inspect` and compared by value; the keys must say the same. The
values are those that look like pieces of a key, of each other, and of other calls.
"""

from __future__ import annotations

import datetime
import decimal
import inspect
import os
import uuid
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.folding import fold, key_of

CASES = int(os.environ.get("KEY_CASES", 200))
"""`make test-all` has more, and so has `test_key_properties.py`."""


def plain(a: Any, b: Any) -> None: ...


def defaults(a: Any, b: Any = 2, c: Any = "x") -> None: ...


def keyword(a: Any, *, b: Any = None, c: Any = (1,)) -> None: ...


def rest(a: Any, *b: Any, c: Any = 1) -> None: ...


def extra(a: Any, b: Any = "", **c: Any) -> None: ...


def all_kinds(a: Any, /, b: Any = 1, *c: Any, d: Any = 2, **e: Any) -> None: ...


FUNCTIONS = [plain, defaults, keyword, rest, extra, all_kinds]
PIECES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 10**30, 0.0, -0.0, 1.0, 1e300, float("inf"), float("nan"),
    "", "0", "1", "2", "x", "a", "b", "null", "true", "nan", "1.0", "1e5", "None", "é", "\x00",
    "z", "zz", "1z", "z1", "-", "1-", "-1", "1-1",
    ":", ",", "=", "(", ")", "[", "]", "{", "}", "<", ">", '"', "'", "%", "#", "/", "\\", " ", "\n",
    "1,b=2", '1",b="2', "x)", "x(", "a=1", "{a}", "<a>", "{{a}}", "%22", "%", "%25", "#" * 33,
    "list", "[1]", '["1"]', "bytes(1)", "Decimal(1)", "set(1)", "UUID(1)", "\ud800", "\U0001f600",
    "x" * 300, "x" * 299 + "y", b"", b"1", b"\x00\xff",
    [], [1], ["1"], (1,), [1, 2], [[1], 2], ["1,2"], [None], [""],
    {}, {"a": 1}, {1: 1}, {"1": 1}, {"a": {"b": 1}}, {"a": "1,b:2"}, {"": ""}, {None: 0},
    set(), {1}, {"1"}, frozenset({1, 2}),
    decimal.Decimal("1"), decimal.Decimal("1.0"), decimal.Decimal("-0"), decimal.Decimal("1E+2"),
    uuid.UUID(int=1), datetime.date(2026, 1, 2), datetime.time(1, 2),
    datetime.datetime(2026, 1, 2), datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
    datetime.datetime(2026, 1, 2, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=1))),
]  # fmt: skip
values = st.sampled_from(PIECES) | st.text("1z-", max_size=3)
names = st.sampled_from(["b", "c", "d", "x", "e"])
Call = tuple[tuple[Any, ...], dict[str, Any]]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Callable[..., None], str | None, Call, Call]:
    """A function, perhaps a template, and two calls of it: one is spelt anew, altered, or other."""
    function = draw(st.sampled_from(FUNCTIONS))
    signature = inspect.signature(function)

    def call() -> Call:
        while True:
            args = tuple(draw(st.lists(values, min_size=1, max_size=3)))
            kwargs = draw(st.dictionaries(names, values, max_size=2))
            try:
                signature.bind(*args, **kwargs)
            except TypeError:
                if function is plain:
                    return (draw(values),), {"b": draw(values)}
                return (draw(values),), {}
            return args, kwargs

    first = call()
    how = draw(st.integers(0, 2))
    second = call() if how == 0 else _spelt_anew(draw, signature, first)
    if how == 2 and second[1]:
        changed = draw(st.sampled_from(sorted(second[1])))
        second = second[0], {**second[1], changed: draw(values)}
    parameters = list(signature.parameters)
    template = draw(
        st.sampled_from([None, None, "k:{%s}", "{%s}{%s}", "{%s}-<%s>x", "{%s}%s1:{%s}"])
    )
    if template is not None:
        picked = [draw(st.sampled_from(parameters)) for _ in range(template.count("%s"))]
        template %= tuple(picked)
    return function, template, first, second


def _spelt_anew(draw: st.DrawFn, signature: inspect.Signature, call: Call) -> Call:
    """The same call: positions as names, defaults left out or written, names in another order."""
    bound = signature.bind(*call[0], **call[1])
    bound.apply_defaults()
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    by_name = False
    has_rest = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
    for name, parameter in signature.parameters.items():
        value = bound.arguments[name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            args += value
        elif parameter.kind is parameter.VAR_KEYWORD:
            kwargs |= value
        elif parameter.kind is parameter.KEYWORD_ONLY:
            kwargs[name] = value
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            args.append(value)
        else:
            by_name = by_name or (not has_rest and draw(st.booleans()))
            if by_name:
                kwargs[name] = value
            else:
                args.append(value)
    return tuple(args), dict(draw(st.permutations(list(kwargs.items()))))


def meaning(function: Callable[..., None], template: str | None, call: Call) -> Any:
    """Return what a call's key must distinguish: its arguments, or those the template names."""
    bound = inspect.signature(function).bind(*call[0], **call[1])
    bound.apply_defaults()
    told = {
        name: fold(value)
        for name, value in bound.arguments.items()
        if template is None or f"{{{name}}}" in template or f"<{name}>" in template
    }
    return tuple(sorted(told.items(), key=repr))


def test_equal_calls_have_equal_keys_and_different_calls_have_different_ones() -> None:
    counts = {True: 0, False: 0}

    @settings(
        max_examples=CASES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(pairs())
    def one(pair: tuple[Callable[..., None], str | None, Call, Call]) -> None:
        function, template, first, second = pair
        key = key_of("app.task", function, template)
        same = meaning(function, template, first) == meaning(function, template, second)
        counts[same] += 1
        assert (key(*first) == key(*second)) == same

    one()
    assert sum(counts.values()) >= CASES
    assert min(counts.values()) >= CASES / 5, counts  # neither half is left to chance


def test_call_of_one_task_never_has_the_key_of_another_task() -> None:
    """Without a template the name of the task is part of it, and cannot be forged by a value."""
    tasks = ["app.t", "app.t(a", "app.t(a=1", "app", "app.t(a=1)", "t", "app.t#", "app.t\n"]
    seen: dict[str, tuple[str, Any]] = {}
    for name in tasks:
        for function in (plain, extra):
            key = key_of(name, function)
            for value in PIECES:
                for other in ("1", 1, "x"):
                    call = key((value, other), {})
                    told = (name, meaning(function, None, ((value, other), {})))
                    assert seen.setdefault(call, told) == told
    assert len(seen) > 1000


LITERALS = [*'z1-_.e~+%:,=()"#/ ']


@settings(max_examples=300, deadline=None, database=None)
@given(st.data(), st.sampled_from(LITERALS))
def test_part_of_a_value_cannot_move_over_into_the_next_in_a_key(
    data: st.DataObject, literal: str
) -> None:
    """The same text is cut at two of the places where separators of values stand."""
    side = st.text(f"{literal}x1", max_size=4)
    text = data.draw(side) + literal + data.draw(side)
    places = [at for at, letter in enumerate(text) if letter == literal]
    cuts = [data.draw(st.sampled_from(places)) for _ in range(2)]
    key = key_of("app.task", plain, "{a}" + literal + "{b}")
    one, other = (key((text[:at], text[at + 1 :]), {}) for at in cuts)
    assert (one == other) == (cuts[0] == cuts[1])
