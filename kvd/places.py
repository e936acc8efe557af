"""Where the sockets of a node lie unless somebody says otherwise: one rule, for both ends.

The daemon puts its sockets there and the client looks there. Paths only: no file is opened.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

SYSTEM_RUNTIME = Path("/run/kvd")


def runtime_directory(environ: Mapping[str, str], uid: int) -> Path:
    """Of a daemon of user ``uid``: /run/kvd for root, else their runtime directory, else /tmp."""
    if uid == 0:
        return SYSTEM_RUNTIME
    own = environ.get("XDG_RUNTIME_DIR", "")
    if own.startswith("/") and Path(own).is_dir():
        return Path(own) / "kvd"
    if SYSTEM_RUNTIME.is_dir():
        return SYSTEM_RUNTIME
    return Path(f"/tmp/kvd-{uid}")
