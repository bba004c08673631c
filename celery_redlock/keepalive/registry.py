"""Register the leases of this process in the table that a supervisor reads.

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
"""Environment variable with the table's owner and address, for spawned children."""


class LeaseRegistry:
    """The registry of this process's leases, for the supervisor if there is one.

    Args:
        nodes: The number of nodes of the lock.
        sidecar: The arguments with which a sidecar reaches the nodes; None for no sidecar.

    Raises:
        ConfigurationError: The nodes cannot be described to another process.

    Attributes:
        table: The table that is shared with the supervisor, or None.
        in_pool_child: True if this process is a child of a pool, which its supervisor may kill.
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
                'keeper="process" needs nodes that can be sent to another process: give URLs,'
                " or mappings of strings and numbers"
            ) from None

    @property
    def own_process(self) -> bool:
        """True if the supervisor is a sidecar, not the process that has started this one."""
        return self._config is not None

    @property
    def paused(self) -> bool:
        """True if the worker's main process has seen that keys may be paused (`pauses.py`)."""
        return self.table is not None and self.table.paused

    def begin(self) -> None:
        """Make the table, before there are children, and start the sidecar if there is one."""
        from .shared_table import MAX_NODES, SharedLeaseTable  # most programs need neither

        with self._beginning:
            # Begun and not done: a handler has interrupted this very thread. Its lock goes without
            # a table.
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
        """Publish the table's address for spawned children, which inherit no memory."""
        if self.table is not None and self.table.address is not None:
            os.environ[VARIABLE] = f"{os.getpid()}:{self.table.address}"

    def accept(self) -> None:
        """Open the parent's table, if this process is a spawned child."""
        parent, _, address = os.environ.get(VARIABLE, "").partition(":")
        if self._config is not None or parent != str(os.getppid()):
            return
        from .shared_table import SharedLeaseTable

        with self._beginning, contextlib.suppress(OSError):  # its parent has ended
            if self.table is None:
                self.table = SharedLeaseTable.at(address, self._nodes)

    def forked(self) -> None:
        """Begin again in a forked child; the supervisor of its parent supervises it as well."""
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
        """Record a grant, and for how many seconds it will be extended; None for no limit."""
        if self.table is not None and claim.granted_at is not None:
            self.table.granted(claim, claim.granted_at + (max_lifetime or math.inf))

    def renewed(self, claims: Iterable[Claim]) -> None:
        """Record that this process has extended claims."""
        if self.table is not None:
            for claim in claims:
                self.table.renewed(claim)

    def patience(self, claim: Claim, until: float) -> None:
        """Record when this process may be killed for a claim (`time.monotonic()`, or infinity)."""
        if self.in_pool_child and self.table is not None:
            self.table.patience(claim, until)

    def releasing(self, claim: Claim) -> None:
        """Record that a claim is about to be released."""
        if self.table is not None:
            self.table.releasing(claim)

    def unregister(self, claim: Claim) -> None:
        """Remove a claim that is released, is lost, or will expire."""
        if self.table is not None:
            self.table.unregister(claim)
