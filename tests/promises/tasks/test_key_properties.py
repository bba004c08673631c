"""A key can be read back: that makes it impossible to forge one value with another.

`read` below is the inverse of `text_of`, written from the documented grammar alone. As long as
it recovers every value from its text, no two values that differ can share a text.
"""

from __future__ import annotations

import datetime
import decimal
import os
import pickle
import re
import uuid
from collections.abc import Callable
from urllib.parse import unquote_to_bytes

from hypothesis import given, settings
from hypothesis import strategies as st
from kombu.utils import json

from celery_redlock.keys.canonical import text_of
from celery_redlock.keys.template import MAX_BYTES
from tests.support.folding import fold, key_of

CASES = settings(max_examples=int(os.environ.get("KEY_CASES", 150)), deadline=None)
TOKEN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-~%+")

# Few characters, and those that mean something: collisions would be found at once.
texts = (
    st.text(alphabet='ab1.-_+":%#()[]{},= eé\n\u202e\x1b\ud800\U0001f600', max_size=6)
    | st.text(max_size=6)
    | st.sampled_from(
        ["1", "-1", "1.0", "1e5", "true", "null", "nan", "-inf", "set", "UUID(1)", "bytes", ""]
    )
)
utc_offsets = st.integers(-14 * 60, 14 * 60).map(
    lambda minutes: datetime.timezone(datetime.timedelta(minutes=minutes))
)
json_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | texts
    | st.binary(max_size=6)
    | st.uuids()
    | st.decimals(allow_nan=False)
    | st.datetimes(timezones=st.none() | utc_offsets)
    | st.dates()
    | st.times()
)
json_keys = texts | st.integers(-3, 3) | st.booleans() | st.none() | st.floats()
json_values = st.recursive(
    json_scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(json_keys, inner, max_size=3)
    ),
    max_leaves=6,
)
hashable = json_scalars | st.tuples(json_scalars, texts)
values = (
    json_values
    | st.sets(hashable, max_size=3)
    | st.frozensets(hashable, max_size=3)
    | st.dictionaries(hashable, json_values, max_size=3)
)


def read(text: str, start: int = 0) -> tuple[object, int]:
    """Read one value that begins at `start`; return it folded, and where it ends."""
    first = text[start]
    if first == '"':
        end = text.index('"', start + 1)
        # Decoded by hand, since unquote would replace lone surrogates.
        raw = unquote_to_bytes(text[start + 1 : end])
        return ("str", raw.decode("utf-8", "surrogatepass")), end + 1
    if first == "[":
        items, end = read_items(text, start + 1, "]")
        return ("list", tuple(items)), end
    if first == "{":
        pairs = []
        at = start + 1
        while text[at] != "}":
            key, at = read(text, at + (text[at] == ","))
            assert text[at] == ":"
            item, at = read(text, at + 1)
            pairs.append((key, item))
        return ("dict", frozenset(pairs)), at + 1
    end = start
    while end < len(text) and text[end] in TOKEN:
        end += 1
    word = text[start:end]
    if text[end : end + 1] == "(":
        return read_typed(word, text, end + 1)
    return read_word(word), end


def read_items(text: str, at: int, close: str) -> tuple[list[object], int]:
    items = []
    while text[at] != close:
        item, at = read(text, at + (text[at] == ","))
        items.append(item)
    return items, at + 1


def read_typed(kind: str, text: str, at: int) -> tuple[object, int]:
    if kind == "set":
        items, end = read_items(text, at, ")")
        return ("set", frozenset(items)), end
    end = text.index(")", at)
    inside = text[at:end]
    readers: dict[str, Callable[[str], object]] = {
        "bytes": unquote_to_bytes,
        "UUID": uuid.UUID,
        "Decimal": decimal.Decimal,
        "datetime": str,
        "date": str,
        "time": str,
    }
    return (kind, readers[kind](inside)), end + 1


def read_word(word: str) -> object:
    known = {"true": ("bool", True), "false": ("bool", False), "null": ("NoneType", None)}
    if word in known:
        return known[word]
    if re.fullmatch(r"-?[0-9]+", word):
        return "int", int(word)
    if re.fullmatch(r"-?[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?|nan|-?inf", word):
        return "float", repr(float(word))
    return "str", word


@CASES
@given(values)
def test_value_can_be_read_back_from_its_text_in_a_key(value: object) -> None:
    text = text_of(value)
    assert read(text) == (fold(value), len(text))


@CASES
@given(values, values)
def test_two_values_share_a_text_in_a_key_only_if_documented_as_one(a: object, b: object) -> None:
    assert (text_of(a) == text_of(b)) == (fold(a) == fold(b))


@CASES
@given(values)
def test_text_of_a_value_is_printable_ascii_without_the_digest_mark(value: object) -> None:
    text = text_of(value)
    assert text.isascii()
    assert text.isprintable()
    assert "#" not in text


@CASES
@given(json_values)
def test_round_trip_through_json_or_pickle_keeps_the_text_of_a_value(value: object) -> None:
    text = text_of(value)
    assert text_of(json.loads(json.dumps(value))) == text
    assert text_of(pickle.loads(pickle.dumps(value))) == text


literals = st.text(alphabet='ax1.-_%:("[{}<># é\n', max_size=3)


@st.composite
def templates(draw: st.DrawFn) -> tuple[str, list[tuple[str, str | None]]]:
    """A template, and its pieces: literal text as it stands in a key, and the name after it."""
    template, pieces = "", []
    names: list[str | None] = [
        *draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3)),
        None,
    ]
    for name in names:
        literal = draw(literals)
        template += "".join(c * 2 if c in "{}<>" else c for c in literal)
        template += "" if name is None else "{" + name + "}"
        raw = "".join(
            c if c.isascii() and c.isprintable() and c not in "%#" else
            "".join(f"%{byte:02X}" for byte in c.encode())
            for c in literal
        )  # fmt: skip
        pieces.append((raw, name))
    return template, pieces


def three(a: object, b: object, c: object) -> None: ...


@CASES
@given(templates(), values, values, values)
def test_argument_can_be_read_back_from_the_key_of_a_template(
    made: tuple[str, list[tuple[str, str | None]]], a: object, b: object, c: object
) -> None:
    template, pieces = made
    key = key_of("app.three", three, template)((a, b, c), {})
    if "#" in key:
        assert len(key) == MAX_BYTES
        return
    at = 0
    for (literal, name), (after, following) in zip(pieces, [*pieces[1:], ("", None)], strict=True):
        assert key.startswith(literal, at)
        at += len(literal)
        if name is None:
            break
        if key[at] == "(":
            found, at = read(key, at + 1)
            assert key[at] == ")"
            at += 1
        elif after and after[0] in TOKEN:
            end = key.index(after[0], at)
            found, stop = read(key[at:end])
            assert stop == end - at
            at = end
        else:
            assert after or following is None
            found, at = read(key, at)
        assert found == fold({"a": a, "b": b, "c": c}[name])
    assert at == len(key)
