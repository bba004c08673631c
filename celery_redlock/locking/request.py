"""The arguments of one request for a lock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..config.options import check_option
from ..protocol.errors import ConfigurationError
from ..protocol.names import Limit, Limits, Resources, checked_names, of_each, paired, plain
from ..protocol.rate import Rate
from ..protocol.texts import shown
from ..protocol.values import Owner
from ..stores.kinds import refuse, refuse_ttl

if TYPE_CHECKING:
    from .client import LockClient

__all__ = ["LockRequest", "request_of"]


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


def request_of(
    client: LockClient,
    resource: Resources,
    *,
    ttl: float | None = None,
    wait: float = 0.0,
    owner: Owner | None = None,
    fencing: bool | None = None,
    limit: int | Sequence[int] = 1,
    shared: bool = False,
) -> LockRequest:
    """Check the arguments of a call, and add the defaults of its client.

    Raises:
        ConfigurationError: An argument has no meaning, or does not go with another.
    """
    check_option("wait", wait)
    checked = check_option("limit", limit)
    if callable(checked):
        raise ConfigurationError(f"limit must be a number, or one for each name: {limit!r}")
    if owner is not None and not isinstance(owner, Owner):
        raise ConfigurationError(f"owner must be an Owner or None; it is {owner!r}")
    fencing = client.fencing if fencing is None else bool(check_option("fencing", fencing))
    names = checked_names(resource, fencing=fencing)
    if isinstance(checked, tuple):
        names, checked = paired([resource] if isinstance(resource, str) else resource, checked)
    if fencing:
        refuse(client.kind, "a fencing token", "fencing")
    if checked != 1:
        refuse(client.kind, "a limit", "limits")
    if len(names) > 1:
        refuse(client.kind, "a lock of several keys", "several")
    if fencing and checked != 1:
        raise ConfigurationError(
            f"{shown(names)}: with a limit there are several holders at a time, and a fencing"
            " token would refuse the writes of all but the last; give fencing=False"
        )
    if check_option("shared", shared):
        refuse(client.kind, "shared=True", "shared")
        if fencing or checked != 1 or len(names) > 1:
            raise ConfigurationError(
                f"{shown(names)}: a shared lock is of one resource, without a limit and without"
                " a fencing token, which would refuse the writes of all readers but the last:"
                " give one name, limit=1 and fencing=False"
            )
    ttl = client.ttl if ttl is None else check_option("ttl", ttl)
    refuse_ttl(client.addresses[0], "ttl", ttl)
    return LockRequest(
        names=names,
        ttl=ttl,
        wait=wait,
        owner=owner,
        fencing=fencing,
        limit=checked,
        shared=shared,
    )
