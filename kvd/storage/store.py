"""A tier in a store that speaks S3 and that nodes share: a page an object, by a name that all find.

    BUCKET/PREFIX/LAYOUT/=NAMESPACE/KEY

The names are those of ``posix``: what one node has written another finds, if its pool has the same
layout. Nothing here is of one node: nobody owns an object, nobody lists them, and what lies there
goes by the lifetime that the bucket gives it. An object is read and written as a whole, through
memory of this process, and is copied into the pool when its head was judged.

Whether objects are there is asked by reading their heads: so one that is another's, or of nothing,
is not there. One that turned out to be bad is written over by a byte: nobody reads it again, and
whoever has the page writes it anew.

What must not live here: what goes wrong with requests (``nixl_objects``).
"""

from __future__ import annotations

import ctypes
import threading
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
from typing_extensions import override

from kvd.storage.backend import Backend, Capabilities, Existence, SearchOutcome
from kvd.storage.nixl_objects import ABSENT, ObjectMove, ObjectQueue, StoreSite
from kvd.storage.objects import BadObject, escaped, read_head
from kvd.storage.sizes import HEAD_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from kvd.storage.backend import ObjectName, ObjectRead, ObjectWrite, StoredObject
    from kvd.storage.objects import ObjectHead
    from kvd.storage.orders import StorePlan
    from kvd.storage.pages import ObjectPages
    from kvd.transfer.nixl import Binding

    Bytes = NDArray[np.uint8]
    Words = NDArray[np.uint64]

REQUESTS: Final = 16
"""Under way at a time, each way."""
HEADS: Final = 32
BATCH: Final = 64
"""Objects that the lanes give at a time."""
WHOLE: Final = 4
"""A batch takes at most this part of the time after which the process would be ended."""


class StoreTier(Backend):
    """One prefix of one bucket."""

    def __init__(self, plan: StorePlan, layout: bytes, pages: ObjectPages) -> None:
        """``begin`` makes it ready; until something moves nobody is asked."""
        self.capabilities = Capabilities(
            transport=f"nixl OBJ {plan.endpoint}",
            batch_bytes=BATCH * pages.page_bytes,
            batch_objects=BATCH,
            write_bytes=BATCH * pages.page_bytes,
        )
        self._plan = plan
        self._pages = pages
        self._layout = layout
        self._n_bytes = HEAD_BYTES + pages.page_bytes
        self._root = "/".join([part for part in (plan.prefix, layout.hex()) if part])
        self._whole_s = plan.deadline_s / WHOLE
        self._asking = threading.Lock()
        """Heads are read and bad objects are written over by several threads."""

    def begin(self, binding: Binding, name: str) -> None:
        """Be ready to write and to read.

        Raises:
            NixlUnusable: NIXL refuses.
        """
        plan = self._plan
        site = StoreSite(plan.endpoint, plan.bucket, plan.region, plan.ca_file)
        slots = max(1, min(REQUESTS, plan.max_bytes // self._n_bytes))
        self._writes = ObjectQueue(binding, f"{name}-writes", site, slots, self._n_bytes)
        self._reads = ObjectQueue(binding, f"{name}-reads", site, slots, self._n_bytes)
        self._heads = ObjectQueue(binding, f"{name}-heads", site, HEADS, HEAD_BYTES)

    @override
    def search(self) -> SearchOutcome:
        return SearchOutcome([], 0, "")

    # ---- objects ---------------------------------------------------------------------------------

    @override
    def put(self, objects: Sequence[ObjectWrite]) -> list[str]:
        moves = [
            ObjectMove(self._name(write.name), self._n_bytes, fill=partial(self._fill, write))
            for write in objects
        ]
        return self._writes.write(moves, self._plan.answer_s, self._whole_s)

    def _fill(self, write: ObjectWrite, slot: Bytes) -> None:
        slot[:HEAD_BYTES] = np.frombuffer(write.head, np.uint8)
        begin = slot.ctypes.data + HEAD_BYTES
        for at, address, size in self._pieces(write.addresses):
            ctypes.memmove(begin + at, address, size)

    def _pieces(self, addresses: Words) -> Iterable[tuple[int, int, int]]:
        """Of each piece of a page: its place there, its address, and its bytes."""
        pages = self._pages
        return zip(pages.offsets.tolist(), addresses.tolist(), pages.sizes.tolist(), strict=True)

    @override
    def get(self, objects: Sequence[ObjectRead]) -> list[ObjectHead | BadObject]:
        judged: dict[int, ObjectHead | BadObject] = {}

        def landed(at: int, slot: Bytes) -> str:
            judged[at] = head = objects[at].judge(slot[:HEAD_BYTES].tobytes())
            if isinstance(head, BadObject):
                return head.why
            begin = slot.ctypes.data + HEAD_BYTES
            for place, address, size in self._pieces(objects[at].addresses):
                ctypes.memmove(address, begin + place, size)
            return ""

        moves = [
            ObjectMove(self._name(read.name), self._n_bytes, read=partial(landed, at))
            for at, read in enumerate(objects)
        ]
        outcomes = self._reads.read(moves, self._plan.answer_s, self._whole_s)
        # One that did not come may be as good as ever.
        return [judged.get(at) or BadObject(why, is_there=False) for at, why in enumerate(outcomes)]

    @override
    def exists(self, names: Sequence[ObjectName]) -> Existence:
        judged: dict[int, bool] = {}

        def landed(at: int, slot: Bytes) -> str:
            head = read_head(slot.tobytes(), names[at].key, self._layout, self._pages.page_bytes)
            judged[at] = not isinstance(head, BadObject)
            return ""

        moves = [
            ObjectMove(self._name(name), HEAD_BYTES, read=partial(landed, at))
            for at, name in enumerate(names)
        ]
        with self._asking:
            outcomes = self._heads.read(moves, self._plan.answer_s, self._whole_s)
        unanswered = next((why for why in outcomes if why not in {"", ABSENT}), "")
        return Existence([judged.get(at, False) for at in range(len(names))], unanswered)

    @override
    def drop(self, names: Iterable[ObjectName]) -> None:
        moves = [ObjectMove(self._name(name), 1, fill=_nothing) for name in names]
        with self._asking:
            self._heads.write(moves, self._plan.answer_s, self._whole_s)

    @override
    def age(self, objects: Iterable[StoredObject]) -> None:
        """Nothing: what nodes share goes by its lifetime."""

    @override
    def drop_namespace(self, namespace: str) -> None:
        """Nothing: nobody lists what nodes share; its lifetime removes it."""

    def _name(self, name: ObjectName) -> str:
        return f"{self._root}/{escaped(name.namespace)}/{name.key.hex()}"


def _nothing(slot: Bytes) -> None:
    slot[:] = 0
