"""``python -m kvd`` is the ``kvd`` command."""

from __future__ import annotations

from kvd.parts import needed


def main() -> None:
    """The ``kvd`` command, in an install with or without what it needs."""
    with needed("kvd"):
        from kvd.cli import main as verbs  # noqa: PLC0415 - click may not be installed

        verbs()


if __name__ == "__main__":
    main()
