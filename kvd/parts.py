"""What an install of kvd has: the client's packages, and those that an extra adds.

``pip install kvd`` brings the client and nothing that could disagree with an engine's packages. The
commands ``kvd`` and ``kvd-tui`` are there in any install, so that they can say what they lack.

A row is what pip calls a package, and the modules of it: one of them is enough. The requirements
themselves are in ``pyproject.toml``; a test holds both equal.
"""

from __future__ import annotations

import contextlib
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

Packages = dict[str, tuple[str, ...]]

CLIENT: Final[Packages] = {
    "msgspec": ("msgspec",),
    "numpy": ("numpy",),
    "mypy_extensions": ("mypy_extensions",),
}

EXTRAS: Final[dict[str, Packages]] = {
    "cli": {
        "click": ("click",),
        "rich": ("rich",),
        "typing_extensions": ("typing_extensions",),
        "pyzmq": ("zmq",),
    },
    "console": {"textual": ("textual",)},
    "daemon": {
        "uvloop": ("uvloop",),
        "pynacl": ("nacl",),
        "nixl": ("nixl_cu13", "nixl_cu12"),
        "structlog": ("structlog",),
        "h11": ("h11",),
        "prometheus-client": ("prometheus_client",),
        "xxhash": ("xxhash",),
    },
    "demo": {"torch": ("torch",), "transformers": ("transformers",)},
    # The headers and addresses of aiohttp are of multidict and yarl, which it brings.
    "proxy": {
        "aiohttp": ("aiohttp", "multidict", "yarl"),
        "prometheus-client": ("prometheus_client",),
    },
    "flash": {"flash-attn": ("flash_attn",)},
}
"""Of each extra its own packages; which other extras one includes is not told here."""

NOT_INSTALLED: Final = 78
"""The exit status: starting again would not help, and a service manager does not try."""


def missing(extra: str) -> list[str]:
    """The packages of an extra that are not installed; of its own, and loads none."""
    return [
        package for package, modules in EXTRAS[extra].items() if not any(map(find_spec, modules))
    ]


def lacks(extra: str, packages: list[str]) -> str:
    """The sentence for an install without these packages of ``extra``."""
    names = packages[0]
    if len(packages) > 1:
        names = f"{', '.join(packages[:-1])} and {packages[-1]}"
    verb = "is" if len(packages) == 1 else "are"
    node = "; on a node, pip install 'kvd[daemon]'" if extra == "cli" else ""
    return f"{names} {verb} not installed in {sys.prefix}: pip install 'kvd[{extra}]'{node}"


@contextlib.contextmanager
def needed(program: str) -> Iterator[None]:
    """Whatever is imported within, and is of an extra: end with a sentence where it is not there.

    Anything else that cannot be imported is a fault of kvd, and is raised.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        extra = _extra_of((exc.name or "").partition(".")[0])
        packages = missing(extra) if extra else []
        if not packages:
            raise
        sys.stderr.write(f"{program}: {lacks(extra, packages)}\n")
        raise SystemExit(NOT_INSTALLED) from exc


def is_of_an_extra(exc: ImportError) -> bool:
    """Whether it says that a package of an extra is not installed."""
    is_missing = isinstance(exc, ModuleNotFoundError)
    return is_missing and bool(_extra_of((exc.name or "").partition(".")[0]))


def _extra_of(module: str) -> str:
    for extra, packages in EXTRAS.items():
        if any(module in modules for modules in packages.values()):
            return extra
    return ""
