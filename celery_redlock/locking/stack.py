"""The nested locks that the work of this thread (or greenlet, or asyncio task) runs under.

A context variable holds them. Its value is immutable, because contexts are copied, and a change
must not show in a copy. The leases are in groups of a hundred, called blocks. In a single tuple of
ten thousand, each new lease would copy all others, and compare its resource with each.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

from ..protocol.texts import event

if TYPE_CHECKING:
    from .held import HeldLease

__all__ = ["drop", "leases", "push", "release_leftovers"]

logger = logging.getLogger("celery_redlock")

BLOCK = 100
"""Leases in one block: the square root of ten thousand."""


class _Block(NamedTuple):
    leases: tuple[HeldLease, ...]
    names: frozenset[str]


_NONE = _Block((), frozenset())
_blocks: ContextVar[tuple[_Block, ...]] = ContextVar("celery_redlock_leases", default=())


def push(lease: HeldLease) -> None:
    """Add a lease as the innermost one."""
    blocks, last = _blocks.get(), _NONE
    if blocks and len(blocks[-1].leases) < BLOCK:
        blocks, last = blocks[:-1], blocks[-1]
    # Drop those that an exception has left here at the end of their `with` block.
    leases = tuple([other for other in last.leases if not other._left_over])
    _blocks.set((*blocks, _Block((*leases, lease), last.names.union(lease.resources))))


def drop(lease: HeldLease) -> None:
    """Remove a lease, wherever in the stack it is."""
    left = []
    for block in _blocks.get():
        if not block.names.isdisjoint(lease.resources) and lease in block.leases:
            leases = tuple([other for other in block.leases if other is not lease])
            block = _Block(leases, frozenset([n for other in leases for n in other.resources]))
        if block.leases:
            left.append(block)
    _blocks.set(tuple(left))


def leases(names: Sequence[str] = ()) -> list[HeldLease]:
    """Return the leases of any of these names, or all leases, the innermost first."""
    found: list[HeldLease] = []
    for block in reversed(_blocks.get()):
        if not names:
            found += block.leases[::-1]
        elif not block.names.isdisjoint(names):
            apart = frozenset(names).isdisjoint
            found += [lease for lease in block.leases[::-1] if not apart(lease.resources)]
    return found


def release_leftovers() -> None:
    """Release locks that an earlier delivery in this thread left; there should be none."""
    for held in leases()[::-1]:
        owner = held.request.owner
        # Only a delivery has a stamp: the program itself holds all others (in a solo worker).
        if owner is not None and owner.stamp and held._ours() and held.release():
            logger.warning(
                "%s was still locked after its task had ended",
                held.resource,
                extra=event("lease_left", held.resource),
            )
