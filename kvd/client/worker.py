"""One more process of a session: it maps the pools, and keeps the session alive while it lives.

A worker makes no calls, so nobody would notice that the daemon was restarted: a thread of its own
sleeps until the daemon hangs up, and then joins the session again, once the process that opened it
is back. Descriptors and mappings stay as they are, so nothing else in this process is disturbed.
"""

from __future__ import annotations

import os
import select
import threading
from typing import TYPE_CHECKING

from kvd.client import blocking
from kvd.client.endpoint import attach_path, client_endpoint
from kvd.client.pool import Pools
from kvd.client.returning import WayBack
from kvd.errors import KvdError
from kvd.wire.attach import Join

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from kvd.client.attachment import Attachment
    from kvd.client.pool import Pool
    from kvd.errors import Refusal


class Worker:
    """A process that joined. ``end`` is why it is of no session any more; None while it is."""

    def __init__(self, attachment: Attachment, path: str) -> None:
        """Use ``join``. Takes the attachment over; ``path`` is of the attach socket."""
        self.end: Refusal | None = None
        self._attachment = attachment
        self._path = path
        self._pools = Pools(attachment)
        self._closing = threading.Event()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._stay, name="kvd-worker", daemon=True)
        self._thread.start()

    def pool(self, name: str) -> Pool:
        """The pool of that name.

        Raises:
            KvdError: ``bad-request`` when there is none; ``pool-changed`` or ``unknown-session``
                when the daemon was restarted and this process could not stay of its session.
        """
        if self.end is not None:
            raise KvdError(self.end)
        return self._pools.pool(name)

    def close(self) -> None:
        """Leave the session; repeatable."""
        if self._closing.is_set():
            return
        self._closing.set()
        os.eventfd_write(self._bell, 1)
        self._thread.join()
        self._pools.close()
        self._attachment.close()
        os.close(self._bell)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _stay(self) -> None:
        """Sleep until the daemon hangs up, go back to it, and so on; a thread's whole life."""
        while not self._closing.is_set() and self.end is None:
            self._sleep(self._attachment.fileno(), None)
            word = None if self._closing.is_set() else self._attachment.last_word()
            if word is None:
                continue
            if word.is_retryable:
                self._go_back()
            else:
                self.end = word

    def _go_back(self) -> None:
        way = WayBack(self._path, self._attachment, self._join_again)
        try:
            while not self._closing.is_set() and not way.step():
                if way.sock is not None:
                    self._sleep(way.sock.fileno(), None)
                else:
                    self._sleep(-1, way.pause_s)
        except KvdError as error:
            self.end = error.refusal
        finally:
            way.abandon()

    def _join_again(self) -> Join:
        return Join(self._attachment.attached.token)

    def _sleep(self, fd: int, within_s: float | None) -> None:
        """Until ``fd`` is readable, the time is up, or the bell rings; -1: no descriptor.

        A forked child that closes its copy of this worker rings the bell of its parent, too.
        """
        ready = select.poll()
        ready.register(self._bell, select.POLLIN)
        if fd >= 0:
            ready.register(fd, select.POLLIN)
        found = ready.poll(None if within_s is None else within_s * 1000)
        if any(one == self._bell for one, _ in found) and not self._closing.is_set():
            os.eventfd_read(self._bell)


def join(
    endpoint: str | None = None, *, token: bytes, expects: Mapping[str, str | int] | None = None
) -> Worker:
    """Map the pools in one more process of a session, for example a tensor-parallel worker.

    Args:
        endpoint: as for ``connect``.
        token: ``node.token`` of the process that connected; whoever knows it is of the session.
        expects: as for ``connect``.

    Raises:
        KvdError: ``unreachable``, also while that process is not back after a restart;
            ``unknown-session`` when that session has ended; or ``layout-mismatch`` where the pool
            is not as ``expects`` says.
    """
    address = client_endpoint(endpoint)
    attachment = blocking.attach(address, Join(token))
    attachment.require(expects)
    return Worker(attachment, attach_path(address))
