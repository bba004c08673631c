"""Writers in the nodes' wait queues, as seen from outside, and the readers that passed them.

Pure. How long a reader or a writer waits is judged less what the machine was too busy for, and on a
busy machine that can be nearly all. What is found here does not depend on that: a node lets a
reader in or keeps it out in one atomic step, and a worker joins a queue as a reader or as a writer.
`turns.py` judges both.
"""

from __future__ import annotations

from dataclasses import dataclass, field

CLOSE = 0.8
"""Seconds between two looks that are compared. Within more, a writer may have been notified, have
come too late and have joined again, in the same place."""


@dataclass(frozen=True)
class Look:
    """A look at a key and its wait queue on one node, in one atomic step.

    Attributes:
        at: When; seconds.
        readers: The tokens of the readers that hold the key.
        writers: The entries of the queue that are no reader's and whose processes listen, each with
            the time at which it joined; seconds.
    """

    at: float
    readers: frozenset[str]
    writers: frozenset[tuple[str, float]]


@dataclass
class Queues:
    """Findings of all looks.

    Attributes:
        passed: Of each key and token of a reader that was let in while another reader held the key
            and a writer stood in the queue: the nodes, each with the time.
        stood: Of each key and entry of a writer: the nodes, each with the time when it was first
            seen there.
    """

    passed: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)
    stood: dict[tuple[str, tuple[str, float]], dict[int, float]] = field(default_factory=dict)
    _last: dict[tuple[int, str], Look] = field(default_factory=dict)
    _known: dict[tuple[int, str], set[str]] = field(default_factory=dict)

    def see(self, node: int, resource: str, look: Look) -> None:
        """Compare a look with the last one at the same key on the same node."""
        last = self._last.get((node, resource))
        self._last[node, resource] = look
        known = self._known.setdefault((node, resource), set())
        if last is not None and look.at - last.at < CLOSE:
            held_on = last.readers & look.readers
            if held_on and last.writers & look.writers:
                for token in look.readers - known:
                    self.passed.setdefault((resource, token), {})[node] = look.at
        known |= look.readers
        for entry in look.writers:
            self.stood.setdefault((resource, entry), {}).setdefault(node, look.at)
