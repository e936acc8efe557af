"""Checks of ``kvd doctor`` that look at how peers are told apart: keys, their files, who is listed.

No secret is shown: the public key is, because the other side must have it.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from kvd.cli.finding import Finding, Subject, good, poor, wrong
from kvd.curve import KeyFlaw, read_pair

if TYPE_CHECKING:
    from kvd.config.schema import Config

_MAKE_KEYS = "run kvd keygen on every node, and set peers.secret_key_file and peers.keys"


def peer_keys(subject: Subject) -> list[Finding]:
    """Whether peers prove who they are, and with which files."""
    config = subject.config
    path = config.peers.secret_key_file
    if path is None:
        return [_without_keys(config)]
    if not zmq.has("curve"):
        fix = "pip install --force-reinstall pyzmq, whose wheels have it"
        return [wrong("peers", "this libzmq was built without CURVE", fix)]
    return [_secret_file(Path(path)), _directory(Path(path).parent), *_listed(config)]


def _without_keys(config: Config) -> Finding:
    if config.peers.insecure:
        what = "neither authenticated nor encrypted: peers.insecure = true lets anyone be any node"
        return poor("peers", what, f"{_MAKE_KEYS}; then remove peers.insecure")
    return good("peers", "without keys, on loopback only: any user of this host may be any node")


def _secret_file(path: Path) -> Finding:
    """The configuration is valid, so it could be read a moment ago."""
    own = read_pair(path)
    if isinstance(own, KeyFlaw):
        return wrong("peer key", f"{path} {own.rule}", own.fix)
    mode = stat.S_IMODE(path.stat().st_mode)
    return good("peer key", f"{path}, mode {mode:04o}, public key {own.public}")


def _directory(folder: Path) -> Finding:
    mode = folder.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        what = f"{folder} has mode {stat.S_IMODE(mode):04o}: anyone may put another key there"
        return wrong("peer key directory", what, f"chmod o-w {folder}")
    return good("peer key directory", f"{folder}, mode {stat.S_IMODE(mode):04o}")


def _listed(config: Config) -> list[Finding]:
    """Whom the configuration lists; a dialed or allowed peer without a key makes it invalid."""
    peers = config.peers
    others = [name for name in peers.keys if name != config.node.name]
    if not others:
        what = "peers.keys lists no other node, so nobody can connect"
        return [poor("peers", what, "list the public key of every peer in peers.keys")]
    out = [good("peers", f"authenticated and encrypted; {len(others)} listed: {', '.join(others)}")]
    shut_out = [name for name in others if peers.allow and name not in peers.allow]
    if shut_out:
        what = (
            f"{', '.join(shut_out)}: has a key, and is refused because peers.allow has other names"
        )
        out.append(poor("peers.allow", what, "add it to peers.allow, or remove its key"))
    return out
