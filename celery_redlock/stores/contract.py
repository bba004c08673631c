"""The contract of a store: the types that a kind of lock server implements, and what it declares.

`docs/write-a-store.md` explains it. There are two ways to keep it. A `Store` has a blocking method
per request; a thread of its own calls them (`plain.py`). A kind that writes its requests to a
socket itself implements `Node` (`node.py`) in place of it: Redis, PostgreSQL and etcd do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from ..protocol.errors import ConfigurationError, NodeError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .reading import KeyValue

__all__ = ["Address", "Can", "Granted", "Kind", "Reader", "Store", "Wanted", "refuse", "refuse_ttl"]


@dataclass(frozen=True)
class Can:
    """The capabilities of a kind of store.

    Attributes:
        fencing: "proposed" if a fencing token is at least the number that its holder proposes;
            "counted" if the store numbers its grants by itself; empty if it has no numbers. Then
            `fencing=True` is refused.
        ttl_per_key: True if each key has a ttl of its own, which any process may extend. Else a
            lock lasts as long as the session of the process that took it: `NEEDS_TTL` are refused,
            and no supervisor extends.
        several: True if it grants several keys in one request, all or none. Else such a lock is
            refused.
        limits: True if it grants the slots of a limit. Else limits are refused.
        shared: True if it grants shared locks. Else `shared=True` is refused.
        queues: True if it keeps wait queues and notifies the first waiter. Else waiters poll.
        wakes_waiters: True if a release notifies the waiter in the same request. Else the client
            that releases must do so once it has the answer, and waits for that.
        keeps: True if a release can leave a mark. Else a message that is delivered again after its
            task was done runs again.
        ends_on_time: True if a key is gone after its ttl, however long the server was down. Else a
            release that it missed is sent to it even later.
        quorum: True if several independent servers make one lock. Else one server, or cluster, is
            the authority.
    """

    fencing: str = "counted"
    ttl_per_key: bool = True
    several: bool = True
    limits: bool = True
    shared: bool = False
    queues: bool = False
    wakes_waiters: bool = True
    keeps: bool = False
    ends_on_time: bool = True
    quorum: bool = False


REASONS = {
    "fencing": "{kind} does not number its grants. Leave it out",
    "shared": "needs Redis nodes: a lock in {kind} has one holder here. Leave it out, or use the"
    " locks of {kind} itself",
    "limits": "{kind} grants a key to one holder. Leave it out",
    "several": "{kind} grants one key in a request. Lock one key",
    "ttl_per_key": "a lock in {kind} lasts as long as the session of the process that took it, and"
    " nothing there has a ttl of its own. Leave it out, or use another kind of store",
}
"""Why a feature is refused, by the capability that it needs."""


def refuse(kind: Kind, feature: str, needs: str) -> None:
    """Refuse a feature if a kind of store lacks a capability that it needs.

    Args:
        kind: The kind of store.
        feature: The feature, as its user wrote it.
        needs: The name of the capability.

    Raises:
        ConfigurationError: The kind lacks it. The text says why.
    """
    if not getattr(kind.can, needs):
        reason = REASONS[needs].format(kind=kind.name)
        joined = feature + (" " if reason.startswith("needs") else " cannot be had: ")
        raise ConfigurationError(f"{joined}{reason}")


def refuse_ttl(address: Address, option: str, ttl: float) -> None:
    """Refuse a ttl that is longer than the sessions of a store allow.

    Args:
        address: The address of its server.
        option: The name of the option, as its user wrote it.
        ttl: Its value; seconds.

    Raises:
        ConfigurationError: It is too long.
    """
    longest = getattr(address, "longest_ttl", ttl)
    if ttl > longest:
        raise ConfigurationError(
            f"{option} is {ttl:g}, and a lock in {address.store} lasts {longest:g} s without an"
            f" extension: its session decides. Give {longest:g} or less, or write ?ttl={ttl:g} at"
            " the end of its URL"
        )


class Address(Protocol):
    """The address of one node.

    It may have an `identity`, which is equal only for the same server and database, if its `name`
    is not. Without `ttl_per_key` it has a `longest_ttl`; seconds.

    Attributes:
        name: Its name for people; never a credential.
        store: The name of its kind.
        unverified: If TLS accepts any certificate or name: the setting that makes it check them.
            Else empty.
        exposed: How others can learn the password that is sent there, and the remedy; or None.
        least_timeout: Minimum seconds to wait for an answer.
        moves: True if another server, which may have forgotten locks, can take its place by itself.
    """

    @property
    def name(self) -> str: ...
    @property
    def store(self) -> str: ...
    @property
    def unverified(self) -> str: ...
    @property
    def exposed(self) -> tuple[str, str] | None: ...
    @property
    def least_timeout(self) -> float: ...
    @property
    def moves(self) -> bool: ...


class Reader(Protocol):
    """Reader of the keys of one node for the commands, over a connection of its own.

    Attributes:
        store: The name of its kind.
        prefix: Prefix of our names.
        heard: Time of its last answer; seconds of the monotonic clock.
        by_script: True if wait queues can be read only by a script.
    """

    @property
    def store(self) -> str: ...

    prefix: str
    heard: float
    by_script: bool

    def connect(self) -> None: ...
    def close(self) -> None: ...
    def why(self, error: Exception) -> str: ...
    def rtt(self) -> float: ...
    @property
    def peer(self) -> str: ...
    def scan(self, head: str) -> dict[str, bytes]: ...
    def values(self, keys: Mapping[str, bytes]) -> dict[str, KeyValue]: ...
    def queues(self, keys: Mapping[str, bytes], members: int) -> dict[str, KeyValue]: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Kind:
    """A kind of store. One object per kind, found by the schemes of its URLs (`kinds.py`).

    Its parts are named as in an entry point, `package.module:name`, and imported when a node of
    this kind is named: its client is missing in most installations.

    Attributes:
        name: Its name for people.
        can: Its capabilities.
        parse: Function that returns the `Address` that a URL names. It takes the URL, and the name
            of the URL in errors, and raises `ConfigurationError`. (With a `quorum` it takes and
            returns several.)
        store: Class of its `Store`: it takes an address.
        node: Class of its nodes (`Node`), in place of a `store`.
        reader: Class of the `Reader` of a node: it takes an address, the prefix of our names, and
            the seconds to wait for each answer.
            Without one, a `store` is read.
        subscription: Class of the `Subscription` to a channel of a node, if it `queues`: it takes
            an address and the channel.
        forgets: Events after which a server may lack locks, as a question for the log.
        client: The module of its client. A program without it can publish tasks, and gets an error
            where it would lock. Empty if the parts import it.
        extra: The extra of this package that installs its client; empty without one.
        many: Plural of its servers, for the error about several nodes.
        together: The way to name the servers of one cluster in one URL; empty without one.
        verify: The remedy if a certificate is not checked.
        doctor: The module with the doctor's checks; empty for the usual ones.
        directory: The beginning of the keys of locks, after the prefix.
    """

    name: str
    can: Can
    parse: str
    store: str = ""
    node: str = ""
    reader: str = ""
    subscription: str = ""
    forgets: str = "was its data lost or a backup restored"
    client: str = ""
    extra: str = ""
    many: str = "servers"
    together: str = ""
    verify: str = "let its URL ask for a check"
    doctor: str = ""
    directory: str = ""

    def __post_init__(self) -> None:
        """Check that its parts are there.

        Raises:
            ConfigurationError: One is missing that it needs.
        """
        for needed, why in (
            (self.store or self.node, "names neither a store nor a node"),
            (self.reader or not self.node, "names a node without a reader"),
            (self.subscription or not self.can.queues, "queues, and names no subscription"),
        ):
            if not needed:
                raise ConfigurationError(f"the kind of store {self.name} {why}")

    def part(self, name: str) -> Any:
        """Return the object that one of the parts names.

        Raises:
            ConfigurationError: There is none. The text says what was named.
            ImportError: Something that it imports is missing.
        """
        named = getattr(self, name)
        module, _, inside = named.partition(":")
        try:
            found = getattr(import_module(module), inside, None)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # its client
            found = None
        if found is None:
            raise ConfigurationError(
                f"the kind of store {self.name} names {named} as its {name}, and there is none"
            )
        return found


class Wanted(NamedTuple):
    """A lease that is asked for, extended or released.

    Attributes:
        names: The names of its keys, with the prefix; one, unless the kind grants `several`.
        token: The proof of its holder. UTF-8 can encode it and the names.
        ttl: Seconds that it must last from now on.
    """

    names: tuple[str, ...]
    token: str
    ttl: float


class Granted(NamedTuple):
    """The answer to an acquisition.

    Attributes:
        holder: The token of another holder; None if the lease is ours.
        place: The index of the name that the other holds.
        fence: The number of the grant, greater than that of every earlier grant of the name.
    """

    holder: str | None = None
    place: int = 0
    fence: int = 0


class Store(ABC):
    """One connection to a server. One thread makes it and calls all methods, one after another.

    A method that raises one of `broken` ends the connection, and another is made. Any other
    exception refuses one request. No method may wait without a limit: seconds, not minutes.
    """

    broken: ClassVar[tuple[type[Exception], ...]] = (OSError, NodeError)
    remark: str = ""
    """A warning about the server, set by `connect`; a worker logs it once when it starts."""

    @abstractmethod
    def connect(self) -> str:
        """Connect; return an id of the server's data, which changes if it may have lost locks.

        Raises:
            ConfigurationError: It cannot keep locks, whatever else happens; the text says why.
            Exception: It cannot be reached, or it refuses us.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection. Never fails. May be called without a `connect`."""

    @abstractmethod
    def acquire(self, wanted: Wanted) -> Granted:
        """Set our token where no key of the lease has a living one, at all of its keys or at none.

        Keys that have our own token count as free: the answer to an earlier request was lost.
        """

    @abstractmethod
    def extend(self, wanted: Wanted) -> bool:
        """Let a lease last for its ttl from now on; return False if a key lacks our token."""

    @abstractmethod
    def release(self, wanted: Wanted) -> bool:
        """Delete the keys that have our token, and no other; return False if one lacked it."""

    @abstractmethod
    def peek(self, names: Sequence[str]) -> list[tuple[str, float] | None]:
        """Return the token and the seconds left of each key; None for a free key.

        The seconds may be infinite; they are never more than the ttl that was asked for.
        """

    @abstractmethod
    def scan(self, head: str) -> Iterable[str]:
        """Return the keys that begin with `head`."""

    # -- Optional

    def extend_all(self, wanted: Sequence[Wanted]) -> list[bool]:
        """Extend many leases; faster than one after another, if the server has a way."""
        return [self.extend(one) for one in wanted]

    def tidy(self) -> None:
        """Free own leases whose ttl is over; called once a second without `ttl_per_key`."""
        return None

    def keep(self, name: str, value: str, ttl: float) -> None:
        """Set a key whatever it has, for a ttl; only if the kind `keeps`."""
        raise NotImplementedError

    def join(self, names: Sequence[str], member: str, since: int) -> None:
        """Put a waiter into the queues of some keys, by `since`; only if the kind `queues`.

        Args:
            names: The keys.
            member: The channel of its process, a colon, and its name there.
            since: When it began to wait: microseconds since 1970.
        """
        raise NotImplementedError

    def leave(self, names: Sequence[str], member: str) -> list[bool]:
        """Take a waiter out of the queues of some keys; return whether it was in each."""
        raise NotImplementedError

    def wake(self, name: str) -> bool:
        """Take the first waiter that listens out of a queue and notify it; False if none is there.

        A release calls it after the key was deleted.
        """
        raise NotImplementedError

    def reason(self, error: BaseException) -> str:
        """Return what went wrong, in one line without a secret."""
        return " ".join(str(error).split())[:200] or type(error).__name__
