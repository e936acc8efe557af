"""The terminal's side of the console, which outlives what is no text."""

from __future__ import annotations

from textual.drivers.linux_driver import LinuxDriver
from typing_extensions import override


class Keyboard(LinuxDriver):
    """Textual's own, except that bytes that are no UTF-8 are lost, not the console.

    A terminal of another encoding sends them for an umlaut, and a paste may have anything.
    """

    @override
    def run_input_thread(self) -> None:
        while not self.exit_event.is_set():
            try:
                super().run_input_thread()
            except UnicodeDecodeError:
                continue
