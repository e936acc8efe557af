"""How ``kvd`` ends: the exit statuses, and the exceptions that carry them.

Click prints the sentence of such an exception to the standard error and exits with its status.
"""

from __future__ import annotations

from typing import ClassVar

import click


class VerbFailed(click.ClickException):
    """The daemon, or this host, would not do it."""

    exit_code: ClassVar[int] = 1


class Unreachable(click.ClickException):
    """No daemon answered."""

    exit_code: ClassVar[int] = 3


class Misconfigured(click.ClickException):
    """There is no valid configuration; the message has one line for each error."""

    exit_code: ClassVar[int] = 78
