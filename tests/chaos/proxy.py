"""A TCP proxy that is slow, or that forgets its connections without closing them."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack, suppress
from typing import Any, Final

from tests.chaos.cluster import Cluster
from tests.set_up import SetUp

#: Bytes that are passed on at a time.
PIECE: Final = 16_384


class Proxy(SetUp):
    """Passes connections on to a port of this machine, from a thread of its own.

    Args:
        port: The port that it passes connections on to.

    Attributes:
        port: The port on which it listens.
        delay: Seconds that each piece of data is held back.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self.port = 0
        self.delay = 0.0
        self._generation = 0
        # Nothing else refers to the tasks of forgotten connections.
        self._passing: set[asyncio.Task[Any] | None] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def _set_up(self, stack: ExitStack) -> None:
        self._thread.start()
        stack.callback(self._tear_down)
        listening = asyncio.start_server(self._pass, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(listening, self._loop).result()
        self.port = self._server.sockets[0].getsockname()[1]

    def _tear_down(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def forget(self) -> None:
        """Forget all present connections: what is written to them is lost, and nobody is told."""
        self._generation += 1

    async def _end(self) -> None:
        self._server.close()
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        born = self._generation
        self._passing.add(asyncio.current_task())
        # A task of asyncio's own server that ends as cancelled is reported as an error.
        with suppress(OSError, asyncio.CancelledError):
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target)
            await asyncio.gather(
                self._pump(reader, there_writer, born), self._pump(there_reader, writer, born)
            )

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, born: int
    ) -> None:
        with suppress(OSError):
            while piece := await reader.read(PIECE):
                await asyncio.sleep(self.delay)
                if born == self._generation:
                    writer.write(piece)
                    await writer.drain()
        if born == self._generation:
            writer.close()


class ProxiedCluster(Cluster):
    """A cluster that producers and workers reach through a proxy in front of each node."""

    def _set_up(self, stack: ExitStack) -> None:
        super()._set_up(stack)
        self.proxies = [stack.enter_context(Proxy(node.port)) for node in self.nodes]

    def url(self, first: int = 0) -> str:
        """Return the proxies of all nodes as kombu takes them."""
        ports = [proxy.port for proxy in (*self.proxies[first:], *self.proxies[:first])]
        return ";".join(f"amqp://guest:guest@127.0.0.1:{port}//" for port in ports)
