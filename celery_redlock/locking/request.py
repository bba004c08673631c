"""The arguments of one request for a lock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..protocol.errors import ConfigurationError
from ..protocol.names import Limit, Limits, of_each, plain
from ..protocol.rate import Rate
from ..protocol.texts import shown
from ..protocol.values import Owner

__all__ = ["LockRequest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LockRequest:
    """The arguments of one request for a lock, which were checked before.

    Attributes:
        names: The names to lock; the lock is granted for all of them or for none.
        ttl: The time for which the nodes keep it if nobody extends it; seconds.
        wait: How long to go on trying, in seconds; 0 tries once.
        owner: A description of the caller, for others to read; None for this host and process.
        patience: How long to wait for the nodes' answers to one try, in seconds; None for the node
            timeout.
        fencing: True if the lease gets a fencing token.
        limit: How many may hold each of the names at a time.
        declared: The declared limit, if an operator has changed it; otherwise None.
        shared: True if other readers may hold it at the same time.
        rate: The rate, if the names are the slots of its starts; None for a lock.
        recall: For how long an earlier holder may have kept it (`hold_for`); see `Claim.recall`.
    """

    names: tuple[str, ...]
    ttl: float
    wait: float = 0.0
    owner: Owner | None = None
    patience: float | None = None
    fencing: bool = False
    limit: Limit = 1
    declared: Limit | None = None
    shared: bool = False
    rate: Rate | None = None
    recall: float = 0.0

    @property
    def resource(self) -> str:
        """The names to lock as one text, for people."""
        return shown([plain(name) for name in self.names] if self.rate else self.names)

    def part(self, names: Sequence[str]) -> LockRequest:
        """Return a request for only some of its names."""
        limit = self.limit
        if isinstance(limit, Limits):
            of = dict(zip(self.names, limit.of, strict=True))
            wide = dict(zip(self.names, limit.wide, strict=False))
            limit = Limits(
                tuple(of[name] for name in names), tuple(wide[name] for name in names if wide)
            )
        return replace(self, names=tuple(names), limit=limit, declared=None)

    @property
    def limits(self) -> Mapping[str, int]:
        """Number of holders allowed for each name, as declared."""
        limit = self.limit if self.declared is None else self.declared
        return dict(zip(self.names, of_each(self.names, limit), strict=True))

    def check_inside(self, outer: LockRequest, fencing_token: int | None) -> None:
        """Refuse to share an outer lock that does less than this request asks for.

        Args:
            outer: The request of the outer lock.
            fencing_token: The fencing token of the outer lock.

        Raises:
            ConfigurationError: The outer lock does less; the text says what is missing.
        """
        if self.fencing and fencing_token is None and outer.ttl < math.inf:
            raise ConfigurationError(
                f"{self.resource}: fencing is asked for inside a lock of the same resource that has"
                " no fencing token; ask for it where the lock is taken, in the outer one"
            )
        if outer.shared and not self.shared:
            raise ConfigurationError(
                f"{self.resource}: an exclusive lock is asked for inside a shared one of the same"
                " resource: two holders that did so would wait for each other; ask for the"
                " exclusive lock in the outer block"
            )
        theirs = outer.limits
        for name, limit in self.limits.items():
            if theirs.get(name, limit) > limit:
                raise ConfigurationError(
                    f"{self.resource}: limit={limit} is asked for inside a lock of the same"
                    f" resource, {name}, with limit={theirs[name]}, which does not keep so many"
                    " out; give the outer one the smaller limit"
                )
