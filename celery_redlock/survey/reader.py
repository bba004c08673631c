"""Read keys at all nodes at once: over connections of their own, within limits of time.

A node that hangs costs the time that the caller allows, and does not lose the other nodes' answers.
A node that sends nonsense costs no more: the reader checks each reply before it is used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Generic, TypeVar

from ..stores.kinds import Address, Reader, open_reader
from ..stores.reading import MAX_TIMEOUTS
from .models import NodeLook

__all__ = ["read_nodes"]

T = TypeVar("T")


class _NodeThread(threading.Thread, Generic[T]):
    """A thread that runs a query at one node. A daemon, because a DNS look-up has no time limit.

    All else ends by itself: a reader limits the time of each reply, and of all together.
    """

    def __init__(
        self, address: Address, prefix: str, query: Callable[[Any], T], timeout: float
    ) -> None:
        super().__init__(name=f"celery_redlock read {address.name}", daemon=True)
        self._address, self._prefix = address, prefix
        self._query, self._timeout = query, timeout
        self._reader: Reader | None = None
        self._begun = monotonic()
        self.result: T | None = None
        self.look = NodeLook(address.name, False, f"no answer within {timeout:g} s")

    def run(self) -> None:
        name = self._address.name
        self._reader = reader = open_reader(self._address, self._prefix, self._timeout)
        try:
            reader.connect()
            rtt = reader.rtt()
            self.result, self.look = self._query(reader), NodeLook(name, True, "", rtt)
        except Exception as error:
            if why := reader.why(error):
                self.look = NodeLook(name, False, why)
        finally:
            reader.close()

    def outcome(self, until: float) -> tuple[NodeLook, T | None]:
        """Wait until it has ended, or its node was silent for the timeout, or until `until`."""
        while self.is_alive():
            heard = self._begun if self._reader is None else self._reader.heard
            now = monotonic()
            if now < min(heard + self._timeout, until):
                self.join(min(heard + self._timeout, until) - now)
                continue
            why = f"no answer within {self._timeout:g} s"
            if now >= until:
                why = f"has not sent all its keys within {MAX_TIMEOUTS * self._timeout:g} s"
            return NodeLook(self.look.name, False, why), None
        return self.look, self.result


def read_nodes(
    addresses: Sequence[Address], prefix: str, query: Callable[[Any], T], timeout: float
) -> tuple[list[NodeLook], list[T | None]]:
    """Run a query at all nodes at once.

    Args:
        addresses: The nodes.
        prefix: Prefix of our keys.
        query: Function that reads from a node; it runs in one thread per node.
        timeout: Seconds without an answer after which a node counts as silent; at least as long
            as another server of a node needs to take over. A node that goes on answering, because
            it has many keys, has ten times as long in all.

    Returns:
        The answer of each node; and the results of the query, None where it failed.
    """
    timeout = max([timeout, *(address.least_timeout for address in addresses)])
    until = monotonic() + MAX_TIMEOUTS * timeout
    threads = [_NodeThread(address, prefix, query, timeout) for address in addresses]
    for thread in threads:
        thread.start()
    outcomes = [thread.outcome(until) for thread in threads]
    for thread in threads:
        thread.join(0.2)  # lets it close its socket; a thread in a DNS look-up may hang
    return [look for look, _ in outcomes], [result for _, result in outcomes]
