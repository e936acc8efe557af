"""The pages, by the names of ``commands.PAGES``, each with the panels that only it has.

Read first: ``page`` (what a page is: what it wants, how it shows it, what its keys do), then any
one, ``peers`` is the shortest. A page holds no data: it gets a snapshot of all that is known.

What must not live here: what data means (``tui.model``) and how it is drawn (``tui.draw``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tui.screens.engines import EnginesPage
from tui.screens.events import EventsPage
from tui.screens.handoffs import HandoffsPage
from tui.screens.overview import OverviewPage
from tui.screens.peers import PeersPage
from tui.screens.pools import PoolsPage
from tui.screens.radix import RadixPage

if TYPE_CHECKING:
    from tui.screens.page import Page

ALL: dict[str, type[Page]] = {
    page.NAME: page
    for page in (
        OverviewPage,
        PoolsPage,
        RadixPage,
        HandoffsPage,
        PeersPage,
        EventsPage,
        EnginesPage,
    )
}
"""In the order of their number keys; then other faces of one of them."""


def page_of(ref: str) -> str:
    """The page that shows what is called ``ref``; empty where none does."""
    kind = ref.partition(":")[0]
    return next((name for name, page in ALL.items() if kind in page.REFS), "")
