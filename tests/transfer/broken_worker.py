"""A transfer process with bugs: any agent it is to build and any copy raises TypeError."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from kvd.transfer import copies, sending_agents, worker

if TYPE_CHECKING:
    import socket


class Buggy:
    """Stands in for ``SendingAgent``."""

    def __init__(self, *_: object, **__: object) -> NoReturn:
        msg = "a bug"
        raise TypeError(msg)


def buggy(*_: object) -> NoReturn:
    """Stand in for ``copy_job``."""
    msg = "a bug"
    raise TypeError(msg)


def main(orders: socket.socket) -> None:
    """Begin with the bugs."""
    vars(sending_agents)["SendingAgent"] = Buggy
    vars(copies)["copy_job"] = buggy
    worker.main(orders)
