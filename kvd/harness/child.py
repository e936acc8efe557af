"""Processes of a measurement that obey one command at a time, each of them ``python -m MODULE``.

What lives here: both ends of the line between such a process and whoever started it. Commands and
answers are structs, one line of JSON each, so that what went wrong can be read. A child ends when
its input does; what it says on standard error is the parent's.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

A = TypeVar("A")
C = TypeVar("C")

STOP_S: Final = 10.0
HEAR_S: Final = 600.0
"""No single command of a measurement takes that long on any machine that it is meant for."""


class ChildFailed(Exception):
    """A process of a measurement ended, or cannot go on; its standard error says more."""


class Child:
    """One such process, from its parent's side."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        prefix: tuple[str, ...] = (),
        pass_fds: tuple[int, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it, with ``prefix`` before its command line; it inherits ``pass_fds``."""
        self._module = module
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=pass_fds,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # Ctrl-C reaches only whoever started it
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._answers = self._process.stdin, self._process.stdout

    @property
    def pid(self) -> int:
        """Of the process, or of what put it into its place."""
        return self._process.pid

    def tell(self, command: msgspec.Struct) -> None:
        """Hand over a command; ``hear`` its answer."""
        with contextlib.suppress(BrokenPipeError):  # then nothing is to be heard
            self._orders.write(msgspec.json.encode(command) + b"\n")
            self._orders.flush()

    def hear(self, kind: type[A], within_s: float = HEAR_S) -> A:
        """The next answer.

        Raises:
            ChildFailed: the process ended instead, or has said nothing for so long.
        """
        # An answer is one line, and there is one for each command: nothing is in the buffer here.
        if not select.select([self._answers], [], [], within_s)[0]:
            raise ChildFailed(f"{self._module} has not answered for {within_s:.0f} s")
        line = self._answers.readline()
        if not line:
            raise ChildFailed(f"{self._module} has ended; its standard error is above")
        return msgspec.json.decode(line, type=kind)

    def do(self, command: msgspec.Struct, kind: type[A]) -> A:
        """``tell`` and ``hear``."""
        self.tell(command)
        return self.hear(kind)

    def stop(self) -> None:
        """End its input, and wait for its end; enforce it after a while."""
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()


def answer(said: msgspec.Struct) -> None:
    """Say something to the parent."""
    sys.stdout.buffer.write(msgspec.json.encode(said) + b"\n")
    sys.stdout.buffer.flush()


def obey(kind: type[C], perform: Callable[[C], msgspec.Struct]) -> None:
    """Do what the parent says, one command after the other, until it says no more."""
    for line in sys.stdin.buffer:
        answer(perform(msgspec.json.decode(line, type=kind)))
