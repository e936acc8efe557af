"""``python -m kvd`` is the ``kvd`` command."""

from kvd.cli import main

main()
