"""A transfer process that answers the order to load an agent with bytes that are no report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.effects import LoadAgent
from kvd.transfer import worker

if TYPE_CHECKING:
    import socket

    from kvd.transfer.orders import Order


class Babbler(worker.TransferWorker):
    """Stands in for ``TransferWorker``."""

    def _obey(self, order: Order) -> None:
        if isinstance(order, LoadAgent):
            self._orders.send(order.metadata)


def main(orders: socket.socket) -> None:
    """Begin with it in the place of the other."""
    vars(worker)["TransferWorker"] = Babbler
    worker.main(orders)
