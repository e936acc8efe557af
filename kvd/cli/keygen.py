"""``kvd keygen``: the key pair with which this node proves to its peers who it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvd import curve
from kvd.cli.exits import VerbFailed
from kvd.config import Config, load
from kvd.config.host import this_host
from kvd.config.render import toml_value

if TYPE_CHECKING:
    from kvd.curve import KeyPair

DIRECTORY = Path("/etc/kvd")


@click.command()
@click.option(
    "--out",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=DIRECTORY,
    show_default=True,
    metavar="DIR",
    help="Where to put peer.secret and peer.public.",
)
@click.option("--force", is_flag=True, help="Replace the keys that are there.")
def keygen_command(directory: Path, *, force: bool) -> None:
    """Make the key pair of this node, and say what to write into whose configuration.

    The secret file (mode 0600) stays on this host and belongs to the user that runs the daemon. The
    public key goes into peers.keys of every node that exchanges KV with this one. Both files hold
    one key of 40 characters and nothing else.
    """
    directory = directory.absolute()
    pair = curve.new_pair()
    try:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        if force:
            curve.replace_files(directory, pair)
        else:
            curve.create_files(directory, pair)
    except curve.KeyExists as exists:
        raise VerbFailed(
            f"{exists} is there already and was not touched; --force replaces both files, and then "
            "every peer needs the new public key"
        ) from exists
    except OSError as error:
        raise VerbFailed(
            f"the keys could not be written to {directory}: {error.strerror}; give --out DIR a "
            "directory of your own"
        ) from error
    loaded = load(None, os.environ, ())
    # The host's name where the configuration is not complete yet.
    complete = loaded.node.name if isinstance(loaded, Config) else None
    name = complete or this_host(os.environ).node_name
    click.echo(_told(directory, pair, name))


def _told(directory: Path, pair: KeyPair, name: str) -> str:
    """Where the keys are, and what becomes of them."""
    secret = directory / curve.SECRET_FILE
    entry = name if "." not in name else toml_value(name)
    return "\n".join(
        (
            f"secret key  {secret} (mode 0600: it stays on this host)",
            f"public key  {directory / curve.PUBLIC_FILE}",
            pair.public,
            "",
            "In kvd.toml of this node:",
            "  [peers]",
            f"  secret_key_file = {toml_value(str(secret))}",
            "",
            f"In kvd.toml of every node that talks to it, if node.name here is {name}:",
            "  [peers.keys]",
            f"  {entry} = {toml_value(pair.public)}",
            "",
            "And the public keys of those nodes under [peers.keys] here. Keys are read at start;",
            "kvd config check says what is missing.",
        )
    )
