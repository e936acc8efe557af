"""Leases of one client, or one lease that was gone to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from typing_extensions import override

from kvd.wire.console import MAX_FILTERS, Filter
from tui.widgets.linetable import LineTable

if TYPE_CHECKING:
    from kvd.wire.console import Query


class OwnedLeases(LineTable):
    """``restrict`` says whose; the filter of the operator comes on top."""

    _only: tuple[Filter, ...] = ()

    @override
    def asks(self) -> Query:
        asked = super().asks()
        return msgspec.structs.replace(asked, filters=(*self._only, *asked.filters)[:MAX_FILTERS])

    def restrict(self, only: tuple[Filter, ...], title: str) -> None:
        """Show only these, from the top."""
        self.title = title
        if only != self._only:
            self._only = only
            self._first = self._cursor = 0
            self._is_following = False
