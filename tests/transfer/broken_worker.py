"""A transfer process whose builder has a bug: any agent it is to build raises TypeError."""

from __future__ import annotations

from typing import NoReturn

from kvd.transfer import links, worker


class Buggy:
    """Stands in for ``Sender``."""

    def __init__(self, *_: object, **__: object) -> NoReturn:
        msg = "a bug"
        raise TypeError(msg)


if __name__ == "__main__":
    vars(links)["Sender"] = Buggy
    worker.main()
