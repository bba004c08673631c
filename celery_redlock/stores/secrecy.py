"""Keeps a node's password out of what is shown: a URL must say clearly where it ends."""

from __future__ import annotations

import contextlib
import re
from urllib.parse import SplitResult, unquote, urlsplit

__all__ = ["is_clear", "parted"]

_URL = r"[\w+]+://(?:[^/?#]*@)?([^@/?#]*)([/?][^@#]*)?"
"""A URL whose host and database cannot be a part of an unquoted password: no @ follows them."""
_URL_OF_LIBPQ = r"\w+://(?:[^/@]*@)?([^@/?#]*)([/?][^@]*)?"
"""The same as libpq reads it: its user and password end at the first @, and may hold ? and #."""


def is_clear(url: str, shape: str = _URL_OF_LIBPQ) -> bool:
    """Return True if it is clear where the user and the password of a URL end."""
    found = re.fullmatch(shape, url)
    # Parsers drop line ends, or stop at a NUL. A quoted @ in a host is a whole URL that is quoted.
    return url.isprintable() and found is not None and "@" not in unquote(found[1])


def parted(url: str) -> SplitResult:
    """Return the parts of a URL, as its parsers see them.

    Raises:
        ValueError: It is not clear where its user and password end. Nothing of it is in the error,
            nor in another that led to it.
    """
    parts = None
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
    if parts is None or not is_clear(url, _URL):
        raise ValueError(
            "it is not clear where its password ends, so it is not shown; in a user, a password and"
            " a database write @ as %40, / as %2F, : as %3A, ? as %3F, # as %23 and % as %25, and"
            " what cannot be printed likewise"
        )
    return parts
