"""A TCP proxy before a server, that cuts and delays where a test says so."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from enum import Enum
from types import TracebackType
from typing import Self


class Do(Enum):
    """What becomes of what a client sent."""

    PASS = "pass"
    CUT_BEFORE = "cut before"
    """The connection is closed; the server never sees it."""
    CUT_AFTER = "cut after"
    """The server gets it and answers; the client sees a closed connection."""
    LATE = "late"
    """The answer comes `delay` seconds late."""


class Proxy:
    """Stands before ``127.0.0.1:target``; `url` is its own address. `on_request` is asked for each chunk that a client
    sends: small commands are one chunk, a pipeline is one as well."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.delay = 0.0
        self.on_request: Callable[[bytes], Do] = lambda _: Do.PASS
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ending = threading.Event()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def drop(self) -> None:
        """Closes every connection there is."""
        for pair in self._pairs:
            for end in pair:
                _close(end)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        while not self._ending.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                client.close()
                continue
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._pairs.append((client, server))
            late, cut = threading.Event(), threading.Event()
            for pump in (self._requests, self._replies):
                thread = threading.Thread(target=pump, args=(client, server, late, cut), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _requests(
        self, client: socket.socket, server: socket.socket, late: threading.Event, cut: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 20):
                do = self.on_request(data)
                if do is Do.CUT_BEFORE:
                    break
                if do is Do.CUT_AFTER:
                    cut.set()
                if do is Do.LATE:
                    late.set()
                server.sendall(data)
        if not cut.is_set():
            _close(client)
            _close(server)

    def _replies(
        self, client: socket.socket, server: socket.socket, late: threading.Event, cut: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 20):
                if cut.is_set():
                    break
                if late.is_set():
                    late.clear()
                    self._ending.wait(self.delay)
                client.sendall(data)
        _close(client)
        _close(server)


def _close(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
