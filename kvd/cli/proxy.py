"""``kvd proxy``: one address for clients of prefill and decode engines."""

from __future__ import annotations

import re
from typing import Final

import click

from kvd.cli.exits import NotInstalled
from kvd.errors import KvdError
from kvd.parts import missing

LISTEN: Final = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})"
)

ENGINE = "URL[,daemon=ENDPOINT[,namespace=NAME]]"


@click.command()
@click.option(
    "--prefill",
    "prefills",
    multiple=True,
    metavar=ENGINE,
    help="An engine that prefills; may be given many times. Without any, engines that decode "
    "compute their prompts themselves.",
)
@click.option(
    "--decode",
    "decodes",
    multiple=True,
    required=True,
    metavar=ENGINE,
    help="An engine that decodes; may be given many times.",
)
@click.option(
    "--listen",
    default="127.0.0.1:8000",
    show_default=True,
    metavar="HOST:PORT",
    help="For clients.",
)
@click.option(
    "--pass-path",
    "also",
    multiple=True,
    metavar="/PATH",
    help="A path that goes on to engines beside those of the HTTP API; with a slash at its end, "
    "all below it. May be given many times.",
)
@click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="NAME=NUMBER",
    help="A bound of time in seconds or of size in bytes, such as prefill_s=60; a wrong name shows "
    "all of them. May be given many times.",
)
@click.option(
    "--in-turn",
    is_flag=True,
    help="Ask the decode engine only when the prefill engine has answered, and never both at once.",
)
def proxy_command(
    prefills: tuple[str, ...],
    decodes: tuple[str, ...],
    listen: str,
    also: tuple[str, ...],
    limits: tuple[str, ...],
    *,
    in_turn: bool,
) -> None:
    """Serve the HTTP API of OpenAI for engines that prefill and engines that decode.

    A request goes to the engine where its prompt would be there soonest: what its node lacks of it,
    and what waits there. With daemon=ENDPOINT that is asked of the daemon of the engine's node, by
    its client socket on this host. Engines of vLLM say in which namespace they keep their prompts;
    for others it follows as namespace=NAME. Without a daemon it is guessed from what was sent there
    before.
    """
    if lacking := missing("proxy"):
        raise NotInstalled("kvd proxy", "proxy", lacking)
    from kvd.proxy.engines import (  # noqa: PLC0415 - needs no HTTP to fail
        EngineRole,
        check_engines,
        parse_engine,
    )
    from kvd.proxy.limits import parse_limits  # noqa: PLC0415 - of an extra
    from kvd.proxy.paths import NotForwarded, check_also  # noqa: PLC0415 - of an extra
    from kvd.proxy.server import run  # noqa: PLC0415 - of an extra

    found = LISTEN.fullmatch(listen)
    if found is None or int(found["port"]) > 65535:
        raise click.BadParameter(f"{listen!r} is no HOST:PORT", param_hint="--listen")
    for path in also:
        try:
            check_also(path)
        except NotForwarded as error:
            raise click.BadParameter(f"{path!r}: {error}", param_hint="--pass-path") from error
    try:
        bounds = parse_limits(limits)
        addresses = [
            *(parse_engine(EngineRole.PREFILL, text) for text in prefills),
            *(parse_engine(EngineRole.DECODE, text) for text in decodes),
        ]
        check_engines(addresses)
    except KvdError as error:
        raise click.UsageError(str(error)) from error
    click.echo(f"kvd proxy: http://{listen} for {len(prefills)} + {len(decodes)} engines")
    try:
        run(
            addresses,
            found["host"] or found["v6"],
            int(found["port"]),
            bounds,
            also,
            in_turn=in_turn,
        )
    except OSError as error:
        raise click.ClickException(f"--listen {listen}: {error.strerror or error}") from error
