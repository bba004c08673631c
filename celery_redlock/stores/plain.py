"""A node, and its reader, of a kind that has a `Store`: a blocking method per request.

A thread of its own makes the connection and calls the store, in the order of the requests. So a
release is never overtaken by the request that it undoes. A pipe says that there are answers: the
driver polls it as it polls the sockets of other kinds.
"""

from __future__ import annotations

import contextlib
import math
import re
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

from ..protocol.errors import ConfigurationError, NodeError
from ..protocol.names import LINE_SUFFIX, base_of
from ..protocol.node_info import NodeInfo
from ..protocol.replies import DONE, MAX_TTL_S, decode
from ..protocol.round import REFUSED, RENEWED, Round, Verb
from ..protocol.texts import printable
from ..runtime.polling import SIZE
from .contract import Kind, Store, Wanted
from .node import Node
from .reading import KeyValue, NodeReader, to_bytes, to_text

__all__ = ["FOREVER_S", "PlainNode", "PlainReader"]

TIDY_S = 1.0
"""Seconds between two looks for leases whose ttl is over, where keys have none of their own."""
CONNECT_S = 10.0
"""Seconds that a store may take to connect."""
FOREVER_S = 10 * 365 * 86_400.0
"""Stands for a server's uptime: what it forgets shows in the id of its data."""

UNSTORABLE = re.compile("[\\\\\0\ud800-\udfff]")
"""Characters that a store need not be able to hold, and the backslash that escapes them."""

Call = Callable[[Store], Any]


def to_store(text: str) -> str:
    """Return a name or a token as a store gets it: UTF-8 can encode it."""
    return UNSTORABLE.sub(lambda found: f"\\{ord(found[0]):04x}", text)


def from_store(text: str) -> str:
    """Return the name or the token that `to_store` has written."""
    return re.sub(r"\\([0-9a-f]{4})", lambda found: chr(int(found[1], 16)), text)


class _Line:
    """A store and the thread that calls it; the connection of a `PlainNode`."""

    def __init__(self, store: Store, name: str, *, tidies: bool) -> None:
        self.store = store
        self._tidies = tidies
        self.ours, self._theirs = socket.socketpair()
        for end in (self.ours, self._theirs):
            end.setblocking(False)
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self.answers: deque[tuple[Any, Exception | None]] = deque()
        self.hello: Any = None
        self.failed: Exception | None = None
        self._there = threading.Event()
        self._closed = False
        name = f"celery_redlock ask {name}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def connected(self) -> str:
        """Return the id of the server's data, once the thread has connected."""
        if not self._there.wait(CONNECT_S):
            raise TimeoutError("no answer in time")
        if self.failed is not None:
            raise self.failed
        return str(self.hello)

    def put(self, call: Call) -> None:
        """Call the store with `call`, after all earlier calls."""
        self._calls.put(call)

    def disconnect(self) -> None:
        """End the thread, which closes the store once its present call has returned."""
        self._closed = True
        self._calls.put(None)
        self.ours.close()

    def _run(self) -> None:
        try:
            self.hello = self.store.connect()
        except Exception as error:
            self.failed = error
        finally:
            self._there.set()
        tidied = monotonic()
        while self.failed is None:
            if self._tidies and monotonic() - tidied >= TIDY_S:
                tidied = monotonic()
                with contextlib.suppress(Exception):  # tried again soon
                    self.store.tidy()
            try:
                call = self._calls.get(timeout=TIDY_S if self._tidies else None)
            except Empty:
                continue
            if call is None or self._closed:
                break  # nobody reads the answer, and what must be done is asked again
            try:
                self.answers.append((call(self.store), None))
            except Exception as error:
                self.answers.append((None, error))
            with contextlib.suppress(OSError):  # full, or closed: either is noticed
                self._theirs.send(b".")
        with contextlib.suppress(Exception):
            self.store.close()
        self._theirs.close()


class PlainNode(Node):
    """The one node of a lock that is kept in a `Store`."""

    def __init__(self, kind: Kind, *args: Any, **options: Any) -> None:
        self.kind = kind
        super().__init__(*args, **options)
        self._made = kind.part("store")
        self.broken = (*self._made.broken, OSError, NodeError)  # type: ignore[misc]

    def connect(self) -> tuple[Any, NodeInfo]:
        """Return a new connection and the facts of its node; see `Node.connect`."""
        store = self._made(self._address)
        line = _Line(store, self.name, tidies=not self.kind.can.ttl_per_key)
        try:
            run_id = line.connected()
        except ConfigurationError as error:
            return line, NodeInfo(unfit=str(error))
        except Exception as error:
            line.disconnect()
            raise NodeError(printable(store.reason(error)), node=self.name) from None
        facts = NodeInfo(run_id=run_id, uptime=FOREVER_S, role="master", remark=store.remark)
        return line, facts

    def fileno(self) -> int:
        """Return the descriptor of the pipe."""
        return int(self.connection.ours.fileno())

    def encode(self, round_: Round) -> None:
        """Return None: a request is made when it is written."""

    def flush(self) -> None:
        """Do nothing: the thread takes what is put."""

    def _begin(self) -> None:
        self.unsent = b""

    def _reason(self, error: Exception) -> str:
        return printable(self.connection.store.reason(error))

    def _put(self, round_: Round, payload: Any) -> None:
        if self.connection is not None:
            self.connection.put(_call(round_, self._prefix, self.kind))

    def _read(self) -> None:
        if not self.connection.ours.recv(SIZE):
            raise NodeError("its thread has ended")
        now = self._clock()
        answers = self.connection.answers
        while answers:
            reply, error = answers.popleft()
            round_ = self.channel.unanswered.popleft()
            if error is None:
                self._answer(round_, decode(round_, reply), now)
            elif isinstance(error, self.broken):
                self.channel.unanswered.appendleft(round_)  # sent again, if somebody waits for it
                raise NodeError(self._reason(error)) from None
            else:
                self._failed(round_, self._reason(error))
            if self.connection is None:
                return  # it was dropped while the answer was handled


# -- The call for each verb; its result is a reply as Redis would give it (`protocol/replies.py`)


def _call(round_: Round, prefix: str, kind: Kind) -> Call:
    claims = round_.claims
    names = tuple(to_store(prefix + name) for claim in claims for name in claim.resources)
    verb = round_.verb
    if verb is Verb.PEEK:
        return partial(_peek, names=names)
    if verb in (Verb.ENQUEUE, Verb.DEQUEUE, Verb.HAND_ON):
        (entry,) = claims
        return partial(_queue, verb=verb, names=names, entry=entry) if kind.can.queues else _nothing
    wanted = [
        Wanted(
            tuple(to_store(prefix + name) for name in claim.resources),
            to_store(claim.token),
            claim.ttl,
        )
        for claim in claims
    ]
    if verb is Verb.ACQUIRE:
        return partial(_acquire, wanted=wanted[0], fenced=claims[0].proposal is not None)
    if verb.extends:
        return partial(_extend, wanted=wanted)
    (claim,) = claims
    mark = claim.mark if verb is Verb.RELEASE and kind.can.keeps else None
    kept = None if mark is None else (to_store(prefix + mark[0]), mark[1])
    wakes = verb is Verb.RELEASE and kind.can.queues
    return partial(_release, wanted=wanted[0], kept=kept, wakes=wakes)


def _nothing(_store: Store) -> int:
    return 1


def _acquire(store: Store, wanted: Wanted, *, fenced: bool) -> Any:
    granted = store.acquire(wanted)
    if granted.holder is None:
        return granted.fence if fenced else None
    token = to_bytes(from_store(granted.holder))
    return [token, granted.place] if len(wanted.names) > 1 else token


def _extend(store: Store, wanted: Sequence[Wanted]) -> bytes:
    return "".join(RENEWED if one else REFUSED for one in store.extend_all(wanted)).encode()


def _release(store: Store, wanted: Wanted, kept: tuple[str, float] | None, *, wakes: bool) -> int:
    if kept is not None:
        store.keep(kept[0], DONE, kept[1])
    held = store.release(wanted)
    return int(held) + 2 * (wakes and any([store.wake(base_of(name)) for name in wanted.names]))


def _peek(store: Store, names: Sequence[str]) -> list[Any]:
    reply: list[Any] = []
    for seen in store.peek(names):
        if seen is None:
            reply += (None, -2)
        else:
            left = -1 if math.isinf(seen[1]) else int(min(seen[1], MAX_TTL_S) * 1000)
            reply += (to_bytes(from_store(seen[0])), max(left, -1))
    return reply


def _queue(store: Store, verb: Verb, names: Sequence[str], entry: Any) -> int:
    if verb is Verb.ENQUEUE:
        store.join(names, entry.token, entry.since)
        return 1
    was_there = store.leave(names, entry.token)
    if verb is Verb.HAND_ON:
        for name, there, held in zip(names, was_there, store.peek(names), strict=True):
            if not (there and held):
                store.wake(name)
    return int(all(was_there))


class PlainReader(NodeReader):
    """Reader of the keys in a `Store`, which is its `connection`; `peer` is not known."""

    connection: Store
    peer = ""

    def __init__(self, kind: Kind, *args: Any) -> None:
        super().__init__(*args)
        self.store = kind.name  # type: ignore[misc]  # a class of ours serves several kinds
        self.connection = kind.part("store")(self._address)
        self.run_id = ""

    def connect(self) -> None:
        """Connect to the server."""
        self.run_id = self._heard(self.connection.connect())

    def why(self, error: Exception) -> str:
        """Return the reason of a failed read, in one line without secrets."""
        return printable(self.connection.reason(error))

    def _ping(self) -> object:
        return self._heard(self.connection.peek([f"{self.prefix}nothing"]))

    def scan(self, head: str) -> dict[str, bytes]:
        """Return the keys that begin with prefix and `head`, by their names without the prefix."""
        found: Iterable[str] = self.connection.scan(to_store(self.prefix + head))
        names = self._heard([from_store(name) for name in found])
        return {name[len(self.prefix) :]: to_bytes(name) for name in names}

    def values(self, keys: Mapping[str, bytes]) -> dict[str, KeyValue]:
        """Return the values of some keys, by their names, without those that do not exist."""
        held = [name for name in keys if not name.endswith(LINE_SUFFIX)]
        seen = self._heard(self.connection.peek([to_store(to_text(keys[name])) for name in held]))
        found = {name: one for name, one in zip(held, seen, strict=True) if one is not None}
        return {
            name: KeyValue(to_bytes(from_store(token)), left)
            for name, (token, left) in found.items()
        }

    def queues(self, keys: Mapping[str, bytes], members: int) -> dict[str, KeyValue]:
        """Return the wait queues under some keys: none is shown."""
        return {}

    def heard_now(self) -> None:
        """Note an answer: the server is not silent."""
        self.heard = monotonic()

    def _heard(self, said: Any) -> Any:
        self.heard_now()
        return said
