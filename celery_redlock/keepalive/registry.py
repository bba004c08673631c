"""Registers the leases of this process in the table that a supervisor reads.

Without a supervisor there is no table, and nothing is registered.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..protocol.claim import Claim
from ..protocol.errors import ConfigurationError

if TYPE_CHECKING:
    from .shared_table import SharedLeaseTable
    from .sidecar import Sidecar

__all__ = ["LeaseRegistry"]

VARIABLE = "CELERY_REDLOCK_TABLE"
"""The environment variable that tells spawned children whose table it is, and where."""


class LeaseRegistry:
    """Tells the supervisor, if there is one, what this process holds.

    Args:
        nodes: How many nodes the lock has.
        sidecar: How the sidecar reaches the nodes; None for no sidecar.

    Raises:
        ConfigurationError: The nodes cannot be described to another process.

    Attributes:
        table: The table that is shared with the supervisor, or None.
        in_pool_child: Whether this process is a child of a pool, which its supervisor may kill.
    """

    def __init__(self, nodes: int, sidecar: Mapping[str, Any] | None = None) -> None:
        self.table: SharedLeaseTable | None = None
        self.in_pool_child = False
        self._nodes = nodes
        self._config = sidecar
        self._sidecar: Sidecar | None = None
        self._beginning = threading.RLock()
        self._begun = False
        try:
            json.dumps(sidecar)
        except (TypeError, ValueError):
            raise ConfigurationError(
                'keeper="process" needs nodes that can be told to another process: give URLs,'
                " or mappings of strings and numbers"
            ) from None

    @property
    def own_process(self) -> bool:
        """Whether a sidecar supervises, not the process that has started this one."""
        return self._config is not None

    @property
    def paused(self) -> bool:
        """Whether keys may be paused (`pauses.py`), as the worker's main process has seen."""
        return self.table is not None and self.table.paused

    def begin(self) -> None:
        """Make the table, before there are children, and start the sidecar if there is one."""
        from .shared_table import MAX_NODES, SharedLeaseTable  # most programs need neither

        with self._beginning:
            # Begun, and not done: a handler has interrupted this very thread. It does without.
            if self._begun or self.table is not None or self._nodes > MAX_NODES:
                return
            self._begun = True
            try:
                table = SharedLeaseTable(self._nodes)
                if self._config is not None:
                    from .sidecar import Sidecar

                    self._sidecar = Sidecar(table, self._config)
                    table.read = True
                self.table = table
            finally:
                self._begun = False

    def offer(self) -> None:
        """Tell children that will be spawned where the table is: they inherit no memory."""
        if self.table is not None and self.table.address is not None:
            os.environ[VARIABLE] = f"{os.getpid()}:{self.table.address}"

    def accept(self) -> None:
        """Open the parent's table, if this is a child that was spawned."""
        parent, _, address = os.environ.get(VARIABLE, "").partition(":")
        if self._config is not None or parent != str(os.getppid()):
            return
        from .shared_table import SharedLeaseTable

        with self._beginning, contextlib.suppress(OSError):  # its parent has ended
            if self.table is None:
                self.table = SharedLeaseTable.at(address, self._nodes)

    def forked(self) -> None:
        """Begin again in a child: the supervisor of its parent's leases supervises its own."""
        self._beginning = threading.RLock()
        self._begun = False
        if self.table is not None:
            self.table.forked()
        if self._sidecar is not None:
            self._sidecar.forked()

    def close(self) -> None:
        """End the sidecar."""
        if self._sidecar is not None:
            self._sidecar.close()

    def register(self, claim: Claim) -> None:
        """Register a token, before it is written to any node."""
        if self._config is not None and self.table is None:
            self.begin()
        if self.table is not None:
            self.table.register(claim)

    def granted(self, claim: Claim, max_lifetime: float | None) -> None:
        """Record that it is granted, and for how long it is extended; seconds, None forever."""
        if self.table is not None and claim.granted_at is not None:
            self.table.granted(claim, claim.granted_at + (max_lifetime or math.inf))

    def renewed(self, claims: Iterable[Claim]) -> None:
        """Record that their holder has extended them."""
        if self.table is not None:
            for claim in claims:
                self.table.renewed(claim)

    def patience(self, claim: Claim, until: float) -> None:
        """Record when this process may be killed for it, by `time.monotonic()`; infinity: never."""
        if self.in_pool_child and self.table is not None:
            self.table.patience(claim, until)

    def releasing(self, claim: Claim) -> None:
        """Record that it is about to be released."""
        if self.table is not None:
            self.table.releasing(claim)

    def unregister(self, claim: Claim) -> None:
        """Remove it: it is released, lost, or left to expire."""
        if self.table is not None:
            self.table.unregister(claim)
