"""A fenced resource: a file that remembers the largest number it has received.

What the bodies write to. It refuses a smaller number, as a database would; and it is the second
oracle: a holder whose lease stands must never be refused.
"""

from __future__ import annotations

import fcntl
import os


class Register:
    """All registers, in a directory.

    Args:
        path: The directory.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def write(self, resource: str, fence: int) -> bool:
        """Write with a fencing token; return True if it is accepted."""
        fd = os.open(os.path.join(self._path, f"{resource}.register"), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            accepted = fence >= int(os.read(fd, 32) or 0)
            if accepted:
                os.pwrite(fd, b"%d" % fence, 0)  # numbers only grow: nothing is left behind it
            return accepted
        finally:
            os.close(fd)
