"""The network between one worker and one node: a TCP proxy that holds, delays and breaks.

What is cut is late and not lost, as TCP has it: bytes wait and go on when the cut is healed. One
thread carries all links of a campaign.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from types import TracebackType

REQUESTS, REPLIES = "requests", "replies"
LOOK = 0.005
"""Seconds between two looks whether a cut is healed."""


class Link:
    """From one worker to one node. Made by `Network.link`; changed from any thread.

    Attributes:
        port: Where it listens.
        target: The node's port.
        held: The ways that are cut.
        delay: Seconds that every piece of data takes, each way.
        jitter: Seconds more, at most.
        breaks: So many replies are broken off after their first byte, and the connection reset.
    """

    def __init__(self, target: int, seed: str) -> None:
        self.target = target
        self.port = 0
        self.held: set[str] = set()
        self.delay = self.jitter = 0.0
        self.breaks = 0
        self._random = random.Random(seed)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def heal(self) -> None:
        """As if nothing had been."""
        self.held = set()
        self.delay = self.jitter = 0.0
        self.breaks = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            _reset(writer)
            return
        pumps = [
            asyncio.ensure_future(self._pump(reader, there[1], REQUESTS)),
            asyncio.ensure_future(self._pump(there[0], writer, REPLIES)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            if not pumps[0].done() and pumps[1].done():
                pumps[0].cancel()  # the node is gone
        except asyncio.CancelledError:
            pass  # the end of the network; asyncio's own callback would complain of it
        finally:
            for pump in pumps:
                with contextlib.suppress(asyncio.CancelledError, OSError):
                    await pump
            for stream in (writer, there[1]):
                stream.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str
    ) -> None:
        try:
            while data := await reader.read(65536):
                if self.delay or self.jitter:
                    await asyncio.sleep(self.delay + self._random.uniform(0.0, self.jitter))
                while way in self.held:
                    await asyncio.sleep(LOOK)
                if way == REPLIES and self.breaks:
                    self.breaks -= 1
                    writer.write(data[:1])
                    await writer.drain()
                    _reset(writer)
                    return
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        with contextlib.suppress(OSError):
            if way == REQUESTS and writer.can_write_eof():
                writer.write_eof()
            else:
                writer.close()


class Network:
    """All links, and the thread that carries them."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # Connections that break are what it is for.
        self._loop.set_exception_handler(lambda loop, context: None)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._servers: list[asyncio.Server] = []
        self._thread.start()

    def link(self, target: int, seed: str) -> Link:
        """A new link to a port of this host."""
        link = Link(target, seed)

        async def listen() -> None:
            server = await asyncio.start_server(link.serve, "127.0.0.1", 0)
            link.port = server.sockets[0].getsockname()[1]
            self._servers.append(server)

        asyncio.run_coroutine_threadsafe(listen(), self._loop).result(5.0)
        return link

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        async def end() -> None:
            for server in self._servers:
                server.close()
            while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in tasks:  # one that was accepted at the last moment starts others
                    task.cancel()
                await asyncio.wait(tasks, timeout=1.0)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._loop.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset, not with a farewell."""
    end = writer.get_extra_info("socket")
    with contextlib.suppress(OSError, AttributeError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
