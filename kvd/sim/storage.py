"""What lies below a simulated pool: objects on a disk, which outlive every process.

The disk is honest about itself and nothing else: an object is what was written under its key, until
a fault makes it short, another one's, or gone. What a storage process says of it is up to whoever
plays that process. It is bounded, and whoever writes beyond the bound is found out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from kvd.core.tiers.keys import each_key
from kvd.sim.violation import require

if TYPE_CHECKING:
    from kvd.core import effects
    from kvd.core.settings import TierSettings

C = TypeVar("C")
"""What a page holds, as the world has it."""


class SimDisk(Generic[C]):
    """The objects of one tier, by namespace and key, the least recently used first."""

    def __init__(self, settings: TierSettings) -> None:
        self.name = settings.name
        self.most = settings.capacity_bytes // settings.object_bytes
        self.objects: dict[tuple[str, bytes], C] = {}
        self.damaged: set[tuple[str, bytes]] = set()
        """Those that will not verify."""

    def write(self, namespace: str, key: bytes, content: C) -> None:
        """An object is there, whole."""
        self.objects.pop((namespace, key), None)
        self.damaged.discard((namespace, key))
        self.objects[namespace, key] = content
        require(
            len(self.objects) <= self.most,
            f"tier {self.name}: {len(self.objects)} objects, it holds {self.most}",
        )

    def read(self, namespace: str, key: bytes) -> C | None:
        """What it holds; None where it is not there or does not verify."""
        if (namespace, key) in self.damaged or (namespace, key) not in self.objects:
            return None
        content = self.objects[namespace, key] = self.objects.pop((namespace, key))
        return content

    def drop(self, order: effects.DropObjects) -> None:
        """These are gone."""
        for key in each_key(order.keys):
            self.objects.pop((order.namespace, key), None)
            self.damaged.discard((order.namespace, key))

    def drop_namespace(self, namespace: str) -> None:
        """All of it is gone."""
        for named in [named for named in self.objects if named[0] == namespace]:
            del self.objects[named]
            self.damaged.discard(named)

    def found(self) -> dict[str, bytes]:
        """By namespace the keys of what lies there, the least recently used first.

        What is damaged looks like the rest until it is read.
        """
        keys: dict[str, list[bytes]] = {}
        for namespace, key in self.objects:
            keys.setdefault(namespace, []).append(key)
        return {namespace: b"".join(found) for namespace, found in keys.items()}
