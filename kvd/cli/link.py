"""Finding the daemon and asking it: what every verb that talks to one shares.

The daemon is found by ``--connect``, else from the configuration that it would read itself. An
answer comes back typed or the verb ends with a sentence and its exit status; nothing hangs.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import click
import msgspec
import zmq

from kvd.cli.exits import Unreachable, VerbFailed
from kvd.cli.options import valid_config, with_config
from kvd.client.admin import AdminClient
from kvd.errors import Code, KvdError, Refusal
from kvd.text import clean, endpoint_flaw
from kvd.wire.admin import AdminFailed, AdminReply, AdminRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

P = ParamSpec("P")
A = TypeVar("A", bound=AdminReply)

CALL = 1
"""The call number of every request here: one is under way at a time."""

FIRST_PAUSE_MS = 50
LONGEST_PAUSE_MS = 1000
"""How long ZMQ waits between attempts to reach a daemon that is down: at first, and at most."""
LOOK_AGAIN_MS = 10_000
"""Without a connection for this long, the obstacle may be another one by now: look again."""


class Target(msgspec.Struct, frozen=True):
    """The daemon to ask, and how long to wait for it."""

    endpoint: str
    timeout_s: float


def with_target(command: Callable[Concatenate[Target, P], None]) -> Callable[P, None]:
    """Give a verb ``--connect``, ``--config`` and ``--timeout``, as one ``Target``."""

    @click.option("--connect", metavar="ENDPOINT", help="Admin socket of the daemon: ipc:///PATH.")
    @with_config("Find the daemon through this file instead of /etc/kvd/kvd.toml.")
    @click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(min=0.01),
        default=5.0,
        show_default=True,
        metavar="SECONDS",
        help="How long to wait for the daemon.",
    )
    @functools.wraps(command)
    def targeted(
        connect: str | None,
        config_file: Path | None,
        timeout_s: float,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        command(Target(endpoint(connect, config_file), timeout_s), *args, **kwargs)

    return targeted  # click fills what the wrapper adds


def endpoint(connect: str | None, config_file: Path | None) -> str:
    """Where the daemon's admin socket is."""
    if connect is None:
        return valid_config(config_file, ()).sockets.admin
    flaw = endpoint_flaw(connect)
    if flaw is not None:
        raise click.BadParameter(flaw, param_hint="--connect")
    return connect


def ask(target: Target, request: AdminRequest, answer: type[A], *, wait_s: float = 0.0) -> A:
    """Send one request and return its answer.

    Args:
        target: the daemon.
        request: what to ask it.
        answer: the type of the answer that belongs to the request.
        wait_s: how long the daemon itself may take its time, beyond the timeout.

    Raises:
        Unreachable: nobody answered.
        VerbFailed: the daemon refused, or answered something else.
    """
    try:
        with AdminClient(target.endpoint) as client:
            reply = client.request(request, timeout_s=target.timeout_s + wait_s)
    except KvdError as exc:
        raise _ended(exc.refusal, target) from exc
    if isinstance(reply, answer):
        return reply
    if isinstance(reply, AdminFailed):
        raise _ended(reply.refusal, target)
    raise VerbFailed(
        f"the daemon at {target.endpoint} answered {type(reply).__name__} where "
        f"{answer.__name__} was due; its version and this command's differ: install one of both"
    )


def until_somebody_listens(target: Target) -> None:
    """Return as soon as the daemon's socket takes a connection, or when it is time to look again.

    ZMQ tries to connect by itself, less and less often; its monitor tells when it has.
    """
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.reconnect_ivl = FIRST_PAUSE_MS
        dealer.reconnect_ivl_max = LONGEST_PAUSE_MS
        monitor = dealer.get_monitor_socket(zmq.EVENT_CONNECTED)
        try:
            dealer.connect(target.endpoint)
            monitor.poll(LOOK_AGAIN_MS)
        finally:
            dealer.disable_monitor()


def _ended(refusal: Refusal, target: Target) -> click.ClickException:
    """The refusal as the end of the verb."""
    side = f"{refusal.side}: " if refusal.side else ""
    sentence = clean(f"{side}{refusal.message} ({refusal.code.value})")
    if refusal.code is not Code.UNREACHABLE:
        return VerbFailed(sentence)
    return Unreachable(
        f"no daemon answers at {clean(target.endpoint)}: {clean(refusal.message)}; "
        "start it with kvd serve, or name its admin socket with --connect"
    )
