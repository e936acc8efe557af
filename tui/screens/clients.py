"""The engines that are attached, and what they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from tui.screens.page import Page
from tui.widgets.fitting import Rules
from tui.widgets.linetable import LineTable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from textual.app import ComposeResult

CLIENTS = Rules(first=("session", "name", "alive", "held_pages", "leases", "oldest"))
LEASES = Rules(first=("id", "state", "owner", "held", "since", "waiting_for", "holders"))


class ClientsPage(Page):
    """Clients above, leases below: whose process it is, whether it lives, and what it holds."""

    NAME = "clients"
    FAULTS: ClassVar[Mapping[str, str]] = {"clients": "alive:gone", "leases": "state:lingering"}
    REFS = ("client", "lease")

    @override
    def compose(self) -> ComposeResult:
        yield LineTable("clients", rules=CLIENTS)
        yield LineTable("leases", rules=LEASES, sort="since")
