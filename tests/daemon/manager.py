"""A service manager for tests: a real notify socket, a descriptor store, and a barrier.

It takes what it is told on a thread of its own, as systemd does in a process of its own.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_S = 20.0


class Told(msgspec.Struct, frozen=True):
    """One datagram: its lines as a table, and when it came."""

    lines: dict[str, str]
    at_s: float


class Manager:
    """Listens on ``address`` while it is entered; keeps ``store_max`` descriptors."""

    def __init__(self, address: str, store_max: int = 0) -> None:
        self.address = address
        self.store: list[tuple[str, int]] = []
        self.told: list[Told] = []
        self._store_max = store_max
        self._new: queue.Queue[Told] = queue.Queue()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._thread = threading.Thread(target=self._listen)
        self._is_over = False

    @classmethod
    def at(cls, directory: Path, store_max: int = 0) -> Manager:
        return cls(str(directory / "notify"), store_max)

    def __enter__(self) -> Manager:
        self._socket.bind("\0" + self.address[1:] if self.address[0] == "@" else self.address)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._socket.shutdown(socket.SHUT_RD)
        self._thread.join(LIMIT_S)
        self._socket.close()
        for _, descriptor in self.store:
            os.close(descriptor)

    def expect(self, key: str, value: str | None = None, within_s: float = LIMIT_S) -> Told:
        """The next datagram with that key, and that value if one is given."""
        end_s = time.monotonic() + within_s
        while True:
            try:
                told = self._new.get(timeout=max(0.0, end_s - time.monotonic()))
            except queue.Empty:
                raise AssertionError(
                    f"nothing of {key}={value} within {within_s} s: {self.told[-8:]}"
                ) from None
            if key in told.lines and value in {None, told.lines[key]}:
                return told

    def forget(self) -> None:
        """What was told until now is not expected any more."""
        while not self._new.empty():
            self._new.get()

    def names(self) -> list[str]:
        return [name for name, _ in self.store]

    def _listen(self) -> None:
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._socket, 8192, 16)
            if self._is_over:
                return
            lines = dict(line.partition("=")[::2] for line in data.decode().splitlines())
            told = Told(lines, time.monotonic())
            # Before it is handled: that ends a barrier's wait, and who waited reads this then.
            self.told.append(told)
            self._handle(lines, descriptors)
            self._new.put(told)

    def _handle(self, lines: dict[str, str], descriptors: list[int]) -> None:
        name = lines.get("FDNAME", "")
        if "FDSTOREREMOVE" in lines:
            for kept in [one for one in self.store if one[0] == name]:
                self.store.remove(kept)
                os.close(kept[1])
        for descriptor in descriptors:
            if "FDSTORE" in lines and len(self.store) < self._store_max:
                self.store.append((name, descriptor))
            else:
                os.close(descriptor)
