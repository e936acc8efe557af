"""``python -m tui``."""

from __future__ import annotations

from tui.cli import main

main()
