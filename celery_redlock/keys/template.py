"""Templates such as `order:<order_id>`, and how texts of arguments are inserted.

Values are written in one canonical form (`canonical.py`), so that the end of each can be read off:
no value of one argument can forge another key. Keys are printable ASCII.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping
from hashlib import blake2b

from ..protocol.errors import ConfigurationError
from .canonical import RAW_LITERAL, TOKEN, escape

MAX_BYTES = 200
"""Keys over this many bytes become a readable head, `#`, and a digest of the whole."""
_DIGEST_BYTES = 16
_HEAD = MAX_BYTES - 1 - 2 * _DIGEST_BYTES
_PRINTF = r"%(?:\(\w*\))?[sdr]"
HEADERS = "headers."
_HEADER = re.compile(r"headers\.[A-Za-z_][\w-]*", re.A)
_MARKED = re.compile(r"(?:[$%]?[\[({<]+\s*|[$%])?\b(\w+)\b(?:\s*[\])}>]+)?")
"""A word, with the marks of an argument in other languages: `$name`, `[name]`, `{{ name }}`."""
_PIECES = re.compile(r"(\{\{|\}\}|<<|>>)|\{([^{}<>]*)\}|<([^{}<>]*)>|([{}<>])|([^{}<>]+)")

Pieces = list[tuple[str, str | None]]
"""Literal text, escaped, and the name of the argument that follows it; None at the end."""


class Template:
    """A compiled template: a head, escaped, and the pieces that follow it."""

    def __init__(self, pieces: Pieces, head: str = "") -> None:
        pieces = [(head + pieces[0][0], pieces[0][1]), *pieces[1:]]
        self._tail = pieces[-1][0]
        self._inserts = tuple(
            (literal, name, _stop(after, following))
            for (literal, name), (after, following) in itertools.pairwise(pieces)
            if name is not None
        )
        self.names = [name for _literal, name, _stop in self._inserts]

    def __call__(self, texts: Mapping[str, str]) -> str:
        """Return the key for the given texts of arguments, by name."""
        key = ""
        for literal, name, stop in self._inserts:
            text = texts[name]
            if stop is not None and stop in text:
                text = f"({text})"
            key += literal + text
        return shortened(key + self._tail)


def _stop(after: str, following: str | None) -> str | None:
    """Return the character in a value for which it must be put into parentheses.

    The value stands before the literal `after`; without parentheses its end would not be clear.
    Return None if the end of any value is clear there; return "", which is in every value, if
    another value follows at once.
    """
    if not after:
        return None if following is None else ""
    if after[0] == "(":  # a bare value before it would read as a type's name
        return ""
    return after[0] if after[0] in TOKEN else None


def shortened(key: str) -> str:
    """Return a key of printable ASCII; a long one as a readable head and a digest of the whole."""
    if len(key) <= MAX_BYTES:
        return key
    digest = blake2b(key.encode("ascii"), digest_size=_DIGEST_BYTES).hexdigest()
    return f"{key[:_HEAD]}#{digest}"


def arguments_of(names: Collection[str]) -> Pieces:
    """Return the pieces that write `(one=...,other=...)`."""
    pieces: Pieces = [*((f",{escape(name)}=", name) for name in names), (")", None)]
    return [("(" + pieces[0][0].lstrip(","), pieces[0][1]), *pieces[1:]]


def parse(template: str, names: Collection[str]) -> Pieces:
    """Split a template into its pieces.

    `{name}` and `<name>` insert an argument, `<headers.name>` a header of the call's message;
    `{{`, `}}`, `<<`, `>>` are the characters themselves.

    Raises:
        ConfigurationError: It is empty, has an unbalanced bracket or an unknown name in brackets,
            or inserts nothing although its text has a known name.
    """

    def refuse(why: str) -> ConfigurationError:
        return ConfigurationError(f"lock key template {template!a}: {why}")

    if not template.strip():
        raise refuse("is empty; name what is locked, such as 'order:<order_id>'")
    known = ", ".join(names) or "none, because the function takes no arguments"
    pieces: Pieces = []
    literal = ""
    for found in _PIECES.finditer(template):
        doubled, braced, angled, broken, text = found.groups()
        if "%" in (text or "") and names and (printf := re.search(_PRINTF, text)):
            raise refuse(
                f"{printf[0]!r} inserts nothing; write the name of an argument, such as"
                f" {{{next(iter(names))}}}"
            )
        if doubled or text:
            literal += doubled[0] if doubled else text
            continue
        if broken:
            raise refuse(f"unbalanced {broken!r} at {found.start()}; write it twice to mean itself")
        name = angled if braced is None else braced
        if not name:
            raise refuse(f"{found[0]!r} inserts nothing; give the name of an argument: {known}")
        if name not in names and not ("headers" not in names and _HEADER.fullmatch(name)):
            if not name.isidentifier():
                said = re.sub(r"<([^<>]*)>", r"{\1}", template)
                raise refuse(
                    f"{found[0]!a} must hold only the name of an argument, without attribute,"
                    f" index, conversion or format; the names are: {known}. For more than a name"
                    f' give a function: key=lambda {", ".join(names)}: f"{said}"'
                )
            raise refuse(f"unknown name {name!a}; the names are: {known}")
        pieces.append((escape(literal, RAW_LITERAL), name))
        literal = ""
    meant = [word for word in re.findall(r"\w+", template) if word in names]
    if meant and not pieces and meant[0] != "self":  # "self" may turn out to be the task
        written = _MARKED.sub(lambda m: f"<{m[1]}>" if m[1] in meant else m[0], template)
        raise refuse(
            f"would be one key for all calls, and {meant[0]!a} in it is the name of an argument:"
            f" write {written!a} for its value. If all calls are to have one key, give a function:"
            f" key=lambda *args, **kwargs: {literal!a}"
        )
    return [*pieces, (escape(literal, RAW_LITERAL), None)]
