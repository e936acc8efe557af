"""The other nodes, as this one knows them: a row for each, both directions."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from kvd.text import clean
from tui.model import neighbours
from tui.model.dress import Wardrobe
from tui.screens.handoffs import show_handoffs
from tui.screens.page import Page
from tui.widgets.dressed import DressedTable
from tui.widgets.fitting import Rules
from tui.widgets.peerpanel import PeerPanel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from textual.app import ComposeResult

    from kvd.wire.console import Cell
    from tui.model.dress import Facts
    from tui.model.moments import Moment


class PeersPage(Page):
    """Us and each peer above, the peer under the cursor below.

    What goes between two other nodes no single daemon knows: it is not drawn.
    """

    NAME = "peers"
    FAULTS: ClassVar[Mapping[str, str]] = {"peers": "!state:up"}
    REFS = ("peer",)

    DEFAULT_CSS = """
    PeersPage > #table-peers { height: 40%; }
    PeersPage > PeerPanel { height: 1fr; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._traffic = neighbours.Traffic()
        self._path = ""

    @override
    def compose(self) -> ComposeResult:
        painters = {
            "state": neighbours.state,
            "in": neighbours.bytes_in,
            "in_trace": neighbours.trace_in,
            "out": neighbours.bytes_out,
            "out_trace": neighbours.trace_out,
            "layout": neighbours.layout,
            "failed": neighbours.failed,
            "trouble": neighbours.trouble,
        }
        yield DressedTable(
            "peers",
            Wardrobe(neighbours.COLUMNS, self._made, neighbours.FIRST),
            painters,
            title="peers",
            rules=Rules(neighbours.MATTERS, neighbours.HIDDEN),
            stands_for=neighbours.STANDS_FOR,
            rates=(self._traffic.incoming, self._traffic.outgoing),
        )
        yield PeerPanel(id="peer")

    @property
    def peers(self) -> DressedTable:
        """The matrix."""
        return self.query_one("#table-peers", DressedTable)

    def _made(self, row: Facts) -> tuple[Cell, ...]:
        return self._traffic.made(row, self._path)

    @override
    def show(self, moment: Moment) -> None:
        if moment.vitals is not None:
            self._path = moment.vitals.transport
            self.peers.title = f"{clean(moment.vitals.node)} <-> peers"
        super().show(moment)
        self.shorten(self.peers)
        panel = self.query_one(PeerPanel)
        if panel.display:
            panel.show(self.peers.facts(), self._traffic, moment.now_s)

    @override
    async def act(self, action: str) -> bool:
        if action != "handoffs":
            return await super().act(action)
        await show_handoffs(self, "peer", self.peers.chosen())
        return True
