"""Two real daemons that know each other by key, and others that they know and should not trust."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
import zmq

from kvd import curve
from kvd.sockets import open_router
from tests.support.daemons import Pair, two_daemons

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPE = {"pool.layers": "1", "pool.heads": "1", "pool.head_dim": "64", "pool.pages": "65"}


class Keyed(msgspec.Struct, frozen=True):
    """The pair, and the public key of its prefill side.

    ``mallory`` and ``eve`` are keys that both list, under these names. ``changed`` and ``bare`` are
    addresses that both dial: there answers somebody with another key than the listed one, and with
    none.
    """

    pair: Pair
    server: str
    mallory: object
    eve: object
    changed: str
    bare: str


def public_of(directory: Path) -> str:
    """The public key beside a secret file."""
    return (directory / curve.PUBLIC_FILE).read_text().strip()


@pytest.fixture(scope="session")
def reachable() -> Iterator[Path]:
    """A directory that every user can get to, so that what keeps one out is not the way."""
    with tempfile.TemporaryDirectory(prefix="kvd-security-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        yield directory


@pytest.fixture(scope="session")
def keyed(reachable: Path) -> Iterator[Keyed]:
    """Started once; no test here may leave it other than it was."""
    mallory, eve = curve.new_pair(), curve.new_pair()
    context = zmq.Context()
    with context, open_router(context) as changed, open_router(context) as bare:
        changed.setsockopt(zmq.CURVE_SERVER, 1)
        changed.setsockopt(zmq.CURVE_SECRETKEY, curve.new_pair().secret.encode())
        ports = [one.bind_to_random_port("tcp://127.0.0.1") for one in (changed, bare)]
        addresses = [f"tcp://127.0.0.1:{port}" for port in ports]
        settings = {
            **SHAPE,
            "peers.keys.mallory": mallory.public,
            "peers.keys.eve": eve.public,
            "peers.keys.changed": curve.new_pair().public,
            "peers.keys.bare": curve.new_pair().public,
            "peers.connect.changed": addresses[0],
            "peers.connect.bare": addresses[1],
        }
        with two_daemons(reachable, settings, with_keys=True) as pair:
            yield Keyed(pair, public_of(pair.prefill.directory), mallory, eve, *addresses)
