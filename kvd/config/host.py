"""What the defaults depend on: this host's name, and where sockets may lie.

Read once, as data, so that ``load`` gives the same answer for the same host.
"""

from __future__ import annotations

import grp
import os
import re
import socket
from typing import TYPE_CHECKING

import msgspec

from kvd.places import runtime_directory

if TYPE_CHECKING:
    from collections.abc import Mapping


class HostFacts(msgspec.Struct, frozen=True):
    """``node_name``, ``runtime`` (a directory) and ``config_file`` are defaults.

    ``group`` is kvd's own group, if this process may give its sockets to it.
    """

    node_name: str
    runtime: str
    group: str | None = None
    config_file: str = "/etc/kvd/kvd.toml"


def this_host(environ: Mapping[str, str]) -> HostFacts:
    """The facts of the host and the user that this process runs as."""
    uid = os.getuid()
    group = "kvd" if uid == 0 and has_group("kvd") else None
    return HostFacts(
        node_name=_node_name(), runtime=str(runtime_directory(environ, uid)), group=group
    )


def has_group(name: str) -> bool:
    """Whether this host knows the group ``name``."""
    try:
        grp.getgrnam(name)
    except (KeyError, ValueError):
        return False
    return True


def _node_name() -> str:
    """The host name with what no node name may hold replaced by ``-``."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64].lstrip("-._")
    return name or "kvd"
