"""The seam between the daemon and whatever moves its pages.

The daemon speaks to a ``Transport``; ``kvd.transfer.process`` is the real one and
``tests.transfer.loopback`` stands in for it in unit tests. Nothing here moves a byte.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from kvd.core.layout.geometry import Geometry
from kvd.transfer.orders import Order, Ready, RegionPlan, Report

OnReports = Callable[[list[Report]], None]
"""Takes reports in the order they were made; called on the event loop."""

OnExit = Callable[[str], None]
"""Takes why an instance ended by itself; called once, after it was reaped."""


class TransportDown(Exception):
    """A transport did not start, or was asked for something after its end."""


NO_FD = -1
"""Of a region on a device."""


class RegionFd(msgspec.Struct, frozen=True):
    """One region of memory: a file descriptor to map, and where its pages lie.

    ``in_huge_pages``: collapse it to 2 MiB pages. ``is_registered``: peers write into it and posts
    read it; otherwise only copies of this process touch it. ``device``: it is to be allocated on
    that CUDA device, and there is no descriptor.
    """

    name: str
    fd: int
    geometry: Geometry
    in_huge_pages: bool = True
    is_registered: bool = True
    device: int | None = None

    def plan(self) -> RegionPlan:
        """What the transfer process must know of this region."""
        shape = self.geometry
        return RegionPlan(
            name=self.name,
            descriptor=self.fd,
            pages=shape.pages,
            page_bytes=shape.page_bytes,
            rows=shape.rows,
            in_huge_pages=self.in_huge_pages,
            is_registered=self.is_registered,
            page_tokens=shape.page_tokens,
            strips=shape.strips,
            layers=shape.layers,
            heads=shape.heads,
            device=self.device,
        )


class Transport(Protocol):
    """One life of a transfer process. Start it once, stop it once; then make another."""

    async def start(self, on_reports: OnReports, on_exit: OnExit) -> Ready:
        """Map and register every region.

        Raises:
            TransportDown: it ended before it was ready; the message says why.
        """
        ...

    def order(self, order: Order) -> None:
        """Queue an order; never blocks. After the end of the transport it does nothing."""
        ...

    async def stop(self) -> None:
        """End it. On return nothing can write into the regions through it any more."""
        ...
