"""``kvd proxy``: one address for clients of prefill and decode engines."""

from __future__ import annotations

import click

from kvd.cli.exits import NotInstalled
from kvd.errors import KvdError
from kvd.parts import missing

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
def proxy_command(
    prefills: tuple[str, ...],
    decodes: tuple[str, ...],
    listen: str,
    also: tuple[str, ...],
    limits: tuple[str, ...],
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
    from kvd.proxy.engines import EngineRole, parse_engine  # noqa: PLC0415 - needs no HTTP to fail
    from kvd.proxy.limits import parse_limits  # noqa: PLC0415 - of an extra
    from kvd.proxy.server import run  # noqa: PLC0415 - of an extra

    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise click.BadParameter(f"{listen!r} is no HOST:PORT", param_hint="--listen")
    for path in also:
        if not path.startswith("/"):
            raise click.BadParameter(f"{path!r} does not begin with /", param_hint="--pass-path")
    try:
        bounds = parse_limits(limits)
        addresses = [
            *(parse_engine(EngineRole.PREFILL, text) for text in prefills),
            *(parse_engine(EngineRole.DECODE, text) for text in decodes),
        ]
    except KvdError as error:
        raise click.UsageError(str(error)) from error
    click.echo(f"kvd proxy: http://{host}:{port} for {len(prefills)} + {len(decodes)} engines")
    run(addresses, host.strip("[]"), int(port), bounds, also)
