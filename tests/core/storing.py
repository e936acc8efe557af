"""A side with a store below its pool, which removes what is older than its lifetime."""

from __future__ import annotations

from collections import Counter

from typing_extensions import override

from kvd.core import effects
from kvd.core.tiers.keys import each_key, keys_along, layout_digest, root_key
from kvd.types import ID_BYTES, Tokens
from tests.core.tiered import PAGE, TieredSide, TieredWorld, disk

LIFETIME_S = 20.0


class StoringSide(TieredSide):
    """Knows when each object was written."""

    @override
    def begin(self) -> None:
        self.at_s: dict[tuple[str, bytes], float] = {}
        self.times: Counter[bytes] = Counter()
        """How often each was written."""
        super().begin()

    @override
    def carry_out(self) -> None:
        self.remove_old()
        order, stored = self.orders[0], self.stored
        super().carry_out()
        if isinstance(order, effects.Demote) and not self.fails_writing:
            assert stored is not None
            keys = each_key(order.keys)
            self.times.update(keys)
            for key in keys:
                self.at_s[order.namespace, key] = self.world.now_s

    @property
    def n_written(self) -> int:
        return self.times.total()

    def remove_old(self) -> None:
        """The bucket's lifecycle."""
        for named, at_s in list(self.at_s.items()):
            if self.world.now_s - at_s >= self.config.tiers[0].lifetime_s:
                del self.at_s[named]
                self.stored.objects.pop(named, None)

    def there(self, toks: Tokens, namespace: str = "") -> int:
        """How many of the first pages of a prompt lie in the store."""
        self.remove_old()
        there = [(namespace, key) in self.stored.objects for key in keys_of(self, toks, namespace)]
        return [*there, False].index(False)


class StoringWorld(TieredWorld):
    """Of such sides."""

    side = StoringSide


def store(**more: object) -> StoringWorld:
    """A world whose sides have a store each; the decode side's is looked at."""
    d_pages = more.pop("d_pages", 33)
    of_tier = {"objects": 500, "moving": 16, "is_shared": True, "lifetime_s": LIFETIME_S, **more}
    return StoringWorld(d_pages=d_pages, tier=disk(**of_tier))


def keys_of(side: TieredSide, toks: Tokens, namespace: str = "") -> list[bytes]:
    """Of all pages of a prompt."""
    layout = layout_digest(side.config.spec)
    return keys_along(root_key(layout, namespace), toks, PAGE * ID_BYTES)
