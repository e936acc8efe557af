"""The terminal's side of the console, which outlives what is no text."""

from __future__ import annotations

from textual._xterm_parser import XTermParser
from textual.drivers.linux_driver import LinuxDriver
from typing_extensions import override


class Keyboard(LinuxDriver):
    """Textual's own, except that bytes that are no UTF-8 are lost, not the console.

    A terminal of another encoding sends them for an umlaut, and a paste may have anything. What
    was read with them is not lost: the first byte of a character is refused with the key after it.
    """

    @override
    def run_input_thread(self) -> None:
        while not self.exit_event.is_set():
            try:
                super().run_input_thread()
            except UnicodeDecodeError as exc:
                self._take(exc.object.decode("utf-8", "ignore"))

    def _take(self, text: str) -> None:
        """What can be read of what was refused."""
        for event in XTermParser(self._debug).feed(text):
            self.process_message(event)
