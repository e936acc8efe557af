"""How ``kvd`` ends: the exit statuses, and the exceptions that carry them.

Click prints the sentence of such an exception to the standard error and exits with its status.
"""

from __future__ import annotations

from typing import ClassVar

import click

from kvd.parts import NOT_INSTALLED, lacks


class VerbFailed(click.ClickException):
    """The daemon, or this host, would not do it."""

    exit_code: ClassVar[int] = 1


class Unreachable(click.ClickException):
    """No daemon answered."""

    exit_code: ClassVar[int] = 3


class Misconfigured(click.ClickException):
    """There is no valid configuration; the message has one line for each error."""

    exit_code: ClassVar[int] = 78


class NotInstalled(click.ClickException):
    """Packages of an extra are not installed here; the message says how to get them."""

    exit_code: ClassVar[int] = NOT_INSTALLED

    def __init__(self, needs: str, extra: str, packages: list[str]) -> None:
        super().__init__(f"{needs} needs more than this install has: {lacks(extra, packages)}")
