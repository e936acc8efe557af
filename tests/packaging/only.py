"""A fresh interpreter in which some packages are not installed, as far as imports can tell."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from kvd.parts import CLIENT, EXTRAS

if TYPE_CHECKING:
    from collections.abc import Iterable

MODULES = {
    extra: frozenset(name for modules in packages.values() for name in modules)
    for extra, packages in {"client": CLIENT, **EXTRAS}.items()
}
"""The modules of the client and of each extra."""

HIDE = "import sys\nsys.modules.update(dict.fromkeys({hidden}))\n"
"""What makes an import of a name fail, and a search for it find nothing."""


def run_with(extras: Iterable[str], code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` where the client's packages and those of ``extras`` are, and of no other."""
    seen = MODULES["client"].union(*(MODULES[extra] for extra in extras))
    hidden = sorted(frozenset().union(*MODULES.values()) - seen)
    return subprocess.run(
        [sys.executable, "-c", HIDE.format(hidden=hidden) + code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
