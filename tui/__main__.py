"""``python -m tui`` is the ``kvd-tui`` command."""

from __future__ import annotations

from kvd.parts import needed


def main() -> None:
    """The console, in an install with or without what it needs."""
    with needed("kvd-tui"):
        from tui.cli import main as console  # noqa: PLC0415 - click may not be installed

        console()


if __name__ == "__main__":
    main()
