"""The view of the leases: who holds or locks what, since when, and what it waits for.

Its columns are declared in ``kvd.core.inspect.schema``, with the fields of the snapshot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from kvd.console.view import View, field_of
from kvd.core.cache.lease import Lease
from kvd.core.inspect.schema import LEASE_COLUMNS

if TYPE_CHECKING:
    from kvd.console.context import Context


class Leases(View[Lease]):
    """Leases may be gone before their row is made."""

    @override
    def is_there(self, context: Context, one: Lease) -> bool:
        """Whether it has not been released meanwhile."""
        return one.id in context.node.leases.leases


LEASES = Leases(
    "leases",
    [field_of(row) for row in LEASE_COLUMNS],
    objects=lambda context, _: context.node.leases.leases.values(),
    key=lambda one: f"lease:{one.id}",
    sort="since",
)
