"""A transfer process with bugs: any agent it is to build and any copy raises TypeError."""

from __future__ import annotations

from typing import NoReturn

from kvd.transfer import copies, links, worker


class Buggy:
    """Stands in for ``Sender``."""

    def __init__(self, *_: object, **__: object) -> NoReturn:
        msg = "a bug"
        raise TypeError(msg)


def buggy(*_: object) -> NoReturn:
    """Stand in for ``begin``."""
    msg = "a bug"
    raise TypeError(msg)


if __name__ == "__main__":
    vars(links)["Sender"] = Buggy
    vars(copies)["begin"] = buggy
    worker.main()
