"""An engine's blocks, and the orders to save them into pages and to load them from there."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeGuard, runtime_checkable

import numpy as np

from kvd.client.arguments import whole
from kvd.client.lease_key import LeaseKey
from kvd.client.mover.engine_memory import HOST, memory_layout, unfit
from kvd.client.mover.pending_copy import OrderPart, PendingCopy
from kvd.client.mover.pieces import NO_BLOCK, PieceTable, pool_bytes
from kvd.errors import Code, KvdError, Number, Refusal
from kvd.wire.attach import pages_sum

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvd.client.mover.engine_memory import BlockLayout
    from kvd.client.mover.mover import Mover
    from kvd.client.mover.pieces import PoolBytes
    from kvd.client.pool import Pool
    from kvd.client.rows import PageNumbers

    Numbers = NDArray[np.int64]

    LayerTensors = object
    """The tensor of a layer, or a sequence of those of its parts."""

    Caches = Mapping[Any, Any] | Sequence[Mapping[Any, Any]]
    """By layer, in their order, its tensors; or a list of such mappings, one for each group of
    layers that has blocks of its own; or either by component."""

    BlockNumbers = PageNumbers | Sequence[PageNumbers]
    """Blocks in the order of their tokens; of layers in groups a row for each."""


FEW: Final = 64
"""Numbers that Python looks through sooner than numpy does."""


@runtime_checkable
class HasPages(Protocol):
    """A lease of the process that opened it, of either client."""

    @property
    def key(self) -> LeaseKey:
        """Of which session and lease the pages are."""
        ...

    def pages_of(self, component: str) -> NDArray[np.int32]:
        """Its pages of that component."""
        ...


class EngineBlocks:
    """KV memory of an engine in blocks, from which pages are filled and which are filled from them.

    Any thread may order. An order returns in some tens of microseconds and is seen through by a
    thread of this process: first its mark has to come, then the daemon says that the pages are the
    lease's and keeps them for the copy, then the bytes move, and the daemon hears that they have.
    """

    def __init__(
        self,
        mover: Mover,
        given: GivenMemory,
        checks: Sequence[Callable[[LeaseKey], None]],
        *,
        mark_within_s: float,
    ) -> None:
        """Use ``Worker.blocks`` or ``Node.blocks``."""
        self._mover = mover
        self._tables = given.tables
        self._ranks = given.ranks
        self._grouped = given.grouped
        self._keep: list[object] | None = given.keep
        self._checks = checks
        self._mark_within_s = mark_within_s
        self._uses = {name: _BlockUses(name, n) for name, n in given.block_counts.items()}
        self._lock = threading.Lock()
        self._open: set[PendingCopy] = set()
        self._is_closed = False

    @property
    def device(self) -> str:
        """Where they lie: ``cpu``, or ``cuda:N``."""
        return self._mover.lane.device or HOST

    def mark(self, stream: object = None) -> object:
        """Stands for what this thread has begun so far in its stream; give it as ``after``.

        Of a device: an event is recorded in ``stream``, a number or whatever has ``cuda_stream``;
        left out, in the current stream of torch, where torch is loaded, else in the default one.
        Record it when no graph is being captured there. Of a processor it has come at once.

        Raises:
            KvdError: ``post-failed`` when the device refuses.
        """
        self._mover.require_alive()
        return self._mover.lane.mark(stream)

    def begin_save(
        self,
        lease: LeaseKey | HasPages,
        blocks: Mapping[str, BlockNumbers],
        *,
        pages: Mapping[str, PageNumbers] | None = None,
        first_page: Mapping[str, int] | int = 0,
        upto_tokens: int | None = None,
        after: object = None,
    ) -> PendingCopy:
        """Fill pages of a lease from blocks; once it is done, ``written`` counts it by itself.

        Args:
            lease: its key, as ``Lease.key`` gave it with the page numbers; or the lease itself,
                whose pages from ``first_page`` on are taken then.
            blocks: by component, the numbers of blocks, in the order of their tokens. Where its
                layers are in groups, a row of them for each group; all of one length. Where a
                group has no block for some of the tokens, as beyond a sliding window, stands -1,
                and its part of that page is not copied.
            pages: by component, the pages of the same tokens.
            first_page: where the first of them is in the lease's row of that component; one number
                for all, or by component.
            upto_tokens: the KV of all tokens below is in the pages once this is done and those
                before it are; left out, of as many as the pages have room for.
            after: a mark, behind which the blocks are written; left out: one that is set now.

        Raises:
            KvdError: at once and with nothing begun: ``bad-pages`` for numbers of blocks or pages
                that cannot be; ``wrong-state`` for blocks that another order writes; as
                ``Worker.check``. All else ends the order, see ``PendingCopy.poll``.
        """
        return self._begin(
            lease,
            blocks,
            pages,
            first_page,
            upto_tokens=None if upto_tokens is None else whole(upto_tokens, "upto_tokens"),
            after=after,
            to_pages=True,
        )

    def begin_load(
        self,
        lease: LeaseKey | HasPages,
        blocks: Mapping[str, BlockNumbers],
        *,
        pages: Mapping[str, PageNumbers] | None = None,
        first_page: Mapping[str, int] | int = 0,
        after: object = None,
    ) -> PendingCopy:
        """Fill blocks from pages of a lease; arguments as ``begin_save``.

        ``after``: a mark, behind which nothing reads or writes the blocks any more.

        Raises:
            KvdError: as ``begin_save``; also for blocks that another order reads.
        """
        return self._begin(
            lease, blocks, pages, first_page, upto_tokens=None, after=after, to_pages=False
        )

    def close(self) -> None:
        """Take no more orders: those that wait end, and those that move are waited for.

        Raises:
            KvdError: ``wrong-state`` when a copy does not end, as on a device that hangs: its
                blocks must not be freed before this process is gone.
        """
        with self._lock:
            self._is_closed = True
            copies = list(self._open)
        self._mover.give_up(copies)
        self._keep = None

    def __enter__(self) -> EngineBlocks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(
        self,
        lease: LeaseKey | HasPages,
        blocks: Mapping[str, BlockNumbers],
        pages: Mapping[str, PageNumbers] | None,
        first_page: Mapping[str, int] | int,
        *,
        upto_tokens: int | None,
        after: object,
        to_pages: bool,
    ) -> PendingCopy:
        key = _key_of(lease)
        parts = self._parts(lease, blocks, pages, first_page, to_pages=to_pages)
        if not any(part.n_bytes for part in parts):
            raise _bad(f"an order of no block for lease {key.lease}: leave it out")
        if after is not None and not isinstance(after, self._mover.lane.mark_kind):
            raise _bad(f"after is {after!r:.100}: give what mark() of these blocks gave")
        after = self.mark() if after is None else after
        # Of another component pages may be of any tokens: a state is of all before one.
        is_first = not self._ranks[parts[0].table.component]
        if upto_tokens is None:
            upto_tokens = parts[0].end_token if to_pages else 0
        elif upto_tokens < 0 or (is_first and upto_tokens > parts[0].end_token):
            raise _bad(
                f"upto_tokens is {upto_tokens}, the blocks of this order reach token "
                f"{parts[0].end_token}"
            )
        copy = PendingCopy(
            key,
            parts,
            to_pages=to_pages,
            upto_tokens=upto_tokens,
            after=after,
            mark_within_s=self._mark_within_s,
        )
        for check in self._checks:
            check(key)
        with self._lock:
            if self._is_closed:
                raise KvdError(_CLOSED)
            for part in parts:
                self._uses[part.table.component].check(part.used, is_written=not to_pages)
            for part in parts:
                self._uses[part.table.component].take(part.used, is_written=not to_pages)
            self._open.add(copy)
        copy.when_safe(self._let_go)
        copy.when_over(self._open.discard)
        try:
            self._mover.order(copy)
        except KvdError as error:
            copy.end(error.refusal)
            raise
        return copy

    def _parts(
        self,
        lease: LeaseKey | HasPages,
        blocks: Mapping[str, BlockNumbers],
        pages: Mapping[str, PageNumbers] | None,
        first_page: Mapping[str, int] | int,
        *,
        to_pages: bool,
    ) -> list[OrderPart]:
        """By component, the first of the pool first: what a save has written is counted in that."""
        _require_map(blocks, "blocks", self._tables)
        if pages is not None:
            _require_map(pages, "pages", self._ranks)
        if isinstance(first_page, Mapping):
            _require_map(first_page, "first_page", self._ranks)
        parts = [
            self._part(lease, name, numbers, pages, first_page, to_pages=to_pages)
            for name, numbers in blocks.items()
        ]
        parts.sort(key=lambda part: self._ranks[part.table.component])
        return parts

    def _part(
        self,
        lease: LeaseKey | HasPages,
        name: str,
        numbers: BlockNumbers,
        pages: Mapping[str, PageNumbers] | None,
        first_page: Mapping[str, int] | int,
        *,
        to_pages: bool,
    ) -> OrderPart:
        table = self._tables[name]
        own = first_page.get(name, 0) if isinstance(first_page, Mapping) else first_page
        first = whole(own, "first_page")
        if not 0 <= first < table.n_pages:
            raise _bad(
                f"first_page is {first}: it is counted from the first page of the lease, of a pool "
                f"of {table.n_pages}"
            )
        if name in self._grouped:
            found = _rows(numbers, table, self._uses[name].n_blocks)
        else:
            found = _numbers(numbers, "block", self._uses[name].n_blocks, first=0)
        if pages is not None and name in pages:
            given: PageNumbers = pages[name]
        elif isinstance(lease, LeaseKey):
            raise _bad(f"pages has none of {name!r}: a key alone does not say which they are")
        else:
            wanted = -(-found.shape[-1] * table.pages_per_block // table.blocks_per_page)
            given = lease.pages_of(name)[first : first + wanted]
        page_numbers = _numbers(given, "page", table.n_pages, first=1)
        _check_lengths(table, found, page_numbers)
        if to_pages:
            _check_once(page_numbers, "pages that are written")
        page_sum = pages_sum(page_numbers.astype("<i4").tobytes())
        part = OrderPart(table, found, page_numbers, first, page_sum)
        _check_once(part.used, "blocks")
        return part

    def _let_go(self, copy: PendingCopy) -> None:
        with self._lock:
            for part in copy.parts:
                uses = self._uses[part.table.component]
                uses.give_back(part.used, is_written=not copy.to_pages)


def _key_of(lease: LeaseKey | HasPages) -> LeaseKey:
    """With plain numbers, as messages have them: a scheduler may have others."""
    try:
        key = lease if isinstance(lease, LeaseKey) else lease.key
    except AttributeError:
        key = None
    if not isinstance(key, LeaseKey):
        raise _bad(f"lease is {lease!r:.100}: give a lease, or its key")
    if type(key.lease) is int and type(key.session) is int:
        return key
    return LeaseKey(
        session=whole(key.session, "key.session"),
        incarnation=key.incarnation,
        lease=whole(key.lease, "key.lease"),
        version=key.version,
    )


def _require_map(given: object, name: str, known: Mapping[str, object]) -> None:
    if not isinstance(given, Mapping):
        raise _bad(f"{name} is {given!r:.100}: give numbers by component, such as {{'kv': [1, 2]}}")
    if wrong := [part for part in given if part not in known]:
        raise _bad(f"{name} has {wrong!r:.100}: of components there are {', '.join(known)} here")


class _BlockUses:
    """By block, how many saves under way read it, and whether a load writes it."""

    def __init__(self, component: str, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._component = component
        self._reads = np.zeros(n_blocks, np.uint32)
        self._is_written = np.zeros(n_blocks, bool)

    def check(self, blocks: Numbers, *, is_written: bool) -> None:
        """Refuse what would read what is written, or write what is used."""
        met = self._is_written[blocks]
        if is_written:
            met = met | (self._reads[blocks] != 0)
        if met.any():
            block = int(blocks[int(np.flatnonzero(met)[0])])
            doing = "written by a load" if self._is_written[block] else "read by a save"
            raise _failure(
                Code.WRONG_STATE,
                f"block {block} of {self._component} is {doing} that is under way: hold it until "
                "that one says safe()",
                block=block,
            )

    def take(self, blocks: Numbers, *, is_written: bool) -> None:
        """They are used from now on."""
        if is_written:
            self._is_written[blocks] = True
        else:
            self._reads[blocks] += 1

    def give_back(self, blocks: Numbers, *, is_written: bool) -> None:
        """One use less."""
        if is_written:
            self._is_written[blocks] = False
        else:
            self._reads[blocks] -= 1


class GivenMemory:
    """What an engine gave, beside the pool that it is copied to and from."""

    def __init__(self) -> None:
        self.tables: dict[str, PieceTable] = {}
        self.block_counts: dict[str, int] = {}
        self.grouped: set[str] = set()
        """Components whose layers were given by groups, be there one."""
        self.ranks: dict[str, int] = {}
        """By component, which of the pool's it is."""
        self.layouts: list[BlockLayout] = []
        self.groups: list[list[BlockLayout]] = []
        """The same, by who has blocks of its own: those of unlike groups may lie over each other,
        since a block is one group's at a time."""
        self.pools: list[PoolBytes] = []
        self.keep: list[object] = []
        """What must not be freed."""

    @property
    def device(self) -> str:
        """Where all of it is.

        Raises:
            KvdError: ``layout-mismatch`` for that of several.
        """
        devices = sorted({layout.device for layout in self.layouts})
        if len(devices) != 1:
            raise unfit(f"blocks on {' and '.join(devices)}: give those of one device")
        return devices[0]


def given_memory(pool: Pool, caches: Caches, *, block_size: int, shard: int) -> GivenMemory:
    """How these tensors lie beside the pool's pages.

    Raises:
        KvdError: ``layout-mismatch`` with both numbers; ``bad-request``; as ``Pool.view``.
    """
    _require_layers(caches)
    first = pool.memory.components[0].name
    names = {part.name for part in pool.memory.components}
    by_component = caches if _are_by_component(caches, names) else {first: caches}
    given = GivenMemory()
    given.ranks = {part.name: rank for rank, part in enumerate(pool.memory.components)}
    for name, layers in by_component.items():
        groups = [layers] if isinstance(layers, Mapping) else list(layers)
        if not isinstance(layers, Mapping):
            given.grouped.add(name)
        laid_out = [_layers(group) for group in groups]
        layouts = [[layout for layer in group for layout in layer] for group in laid_out]
        counts = {layout.n_blocks for group in layouts for layout in group}
        if len(counts) != 1:
            raise unfit(f"layers of {name} with {sorted(counts)} blocks: give all, of one number")
        memory, part = pool.host_memory(name, shard), pool.component(name)
        given.tables[name] = PieceTable(
            part,
            laid_out,
            block_size=block_size if name == first else part.page_size,
            interior=pool.interior,
            address=memory.ctypes.data,
        )
        given.block_counts[name] = counts.pop()
        given.pools.append(pool_bytes(part, memory))
        # The mappings are the engine's to change.
        given.keep += [memory, *(tensor for group in groups for tensor in group.values())]
        given.groups += layouts
        given.layouts += [layout for group in layouts for layout in group]
    _check_apart(given)
    return given


def _require_layers(caches: object) -> None:
    given = caches if isinstance(caches, list | tuple) and caches else [caches]
    if not all(isinstance(group, Mapping) for group in given):
        told = f"caches is a {type(caches).__name__}"
        raise _bad(f"{told}: give the engine's KV tensors by layer, or a list of such groups")


def _are_by_component(caches: Caches, names: set[str]) -> TypeGuard[Mapping[str, Caches]]:
    if not isinstance(caches, Mapping) or not caches or not set(caches) <= names:
        return False
    return all(_is_a_map(layers) for layers in caches.values())


def _is_a_map(layers: object) -> bool:
    """Whether these are layers, or groups of them; the tensors of a layer may be a list too."""
    groups = layers if isinstance(layers, list) and layers else [layers]
    return all(isinstance(group, dict) for group in groups)


def _layers(layers: Mapping[Any, Any]) -> list[list[BlockLayout]]:
    """By layer, its tensors; those that share the tensors of another one have none of their own."""
    found: list[list[BlockLayout]] = []
    known: set[tuple[int, ...]] = set()
    for layer, tensors in layers.items():
        several = list(tensors) if isinstance(tensors, list | tuple) else [tensors]
        layouts = [memory_layout(str(layer), tensor) for tensor in several]
        addresses = tuple(layout.address for layout in layouts)
        if addresses not in known:
            known.add(addresses)
            found.append(layouts)
    if not found:
        raise unfit("no layer was given: pass the engine's KV tensors, by layer")
    return found


def _check_apart(given: GivenMemory) -> None:
    """Refuse blocks that lie over each other, or over the pool's pages."""
    for group in given.groups:
        ordered = sorted(group, key=lambda layout: layout.address)
        for number, layout in enumerate(ordered):
            _check_outside(layout, given.pools)
            for other in ordered[number + 1 :]:
                if other.address >= layout.end:
                    break
                if _meet(layout, other):
                    raise unfit(
                        f"blocks from {layout.address:#x} and from {other.address:#x} on lie over "
                        f"each other: {layout.block_bytes} bytes every {layout.step_bytes}, and "
                        f"{other.block_bytes} every {other.step_bytes}"
                    )


def _check_outside(layout: BlockLayout, pools: Sequence[PoolBytes]) -> None:
    for pool in pools:
        end = pool.address + pool.size
        if layout.device == HOST and layout.address < end and pool.address < layout.end:
            raise unfit(
                f"blocks from {layout.address:#x} to {layout.end:#x} lie in the pool, which is "
                f"mapped from {pool.address:#x} to {end:#x}: they are pages already"
            )


def _meet(layout: BlockLayout, other: BlockLayout) -> bool:
    """Whether a block of one lies over one of the other, which begins behind it."""
    if layout.step_bytes != other.step_bytes:
        return True
    apart = (other.address - layout.address) % layout.step_bytes
    return apart < layout.block_bytes or layout.step_bytes - apart < other.block_bytes


def _numbers(given: BlockNumbers, what: str, end: int, *, first: int) -> Numbers:
    try:
        found = np.asarray(given)
    except (TypeError, ValueError, OverflowError) as exc:
        raise _failure(Code.BAD_PAGES, f"these are no {what} numbers: {exc}") from exc
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise _failure(
            Code.BAD_PAGES,
            f"an array of {found.dtype} with the shape {found.shape} is none of {what} numbers: "
            "pass ints, in one dimension",
        )
    # A copy: an engine writes its table anew for the next step.
    numbers = found.astype(np.int64)
    if numbers.size:
        low, high = _ends(numbers)
        if low < first or high >= end:
            wrong = low if low < first else high
            raise _failure(
                Code.BAD_PAGES,
                f"{what} {wrong} is none: they are {first} to {end - 1} here",
                **{what: wrong, "end": end},
            )
    return numbers


def _rows(given: BlockNumbers, table: PieceTable, end: int) -> Numbers:
    """Those of each group of layers, side by side."""
    rows = list(given)
    n_rows = len(rows) if all(np.ndim(row) == 1 for row in rows) else 0
    lengths = sorted({len(row) for row in rows}) if n_rows else []
    if n_rows != table.n_groups or len(lengths) != 1:
        what = f"{n_rows} rows of {' and '.join(map(str, lengths))}" if n_rows else "no rows"
        raise _failure(
            Code.BAD_PAGES,
            f"{what} of blocks of {table.component}, whose layers are in {table.n_groups} groups: "
            "give a row for each, all for the same tokens",
        )
    return np.stack([_numbers(row, "block", end, first=NO_BLOCK) for row in rows])


def _ends(numbers: Numbers) -> tuple[int, int]:
    """The least and the greatest."""
    if numbers.size <= FEW:
        listed = numbers.tolist()
        return min(listed), max(listed)
    return int(numbers.min()), int(numbers.max())


def _check_lengths(table: PieceTable, blocks: Numbers, pages: Numbers) -> None:
    """Refuse blocks without pages, and pages without blocks; the last of either may be in part."""
    per_page, per_block = table.blocks_per_page, table.pages_per_block
    n_blocks = blocks.shape[-1]
    fits = (
        -(-n_blocks // per_page) == len(pages)
        if per_page > 1
        else -(-len(pages) // per_block) == n_blocks
    )
    if not fits:
        raise _failure(
            Code.BAD_PAGES,
            f"{n_blocks} blocks and {len(pages)} pages of {table.component}, where {per_page} "
            f"blocks are {per_block} pages: both must be of the same tokens",
            blocks=n_blocks,
            pages=len(pages),
        )


def _check_once(numbers: Numbers, what: str) -> None:
    """Refuse to write the same twice: which of the two would be there is chance."""
    known: set[int] = set()
    listed = numbers.tolist()
    if len(listed) < 2 or len(set(listed)) == len(listed):
        return
    for number in listed:
        if number in known:
            raise _failure(
                Code.BAD_PAGES, f"number {number} is twice among the {what}", number=number
            )
        known.add(number)


def _bad(message: str) -> KvdError:
    return _failure(Code.BAD_REQUEST, message)


def _failure(code: Code, message: str, **numbers: Number) -> KvdError:
    return KvdError(Refusal(code, message, side="client", numbers=dict(numbers)))


_CLOSED: Final = Refusal(
    Code.UNREACHABLE, "these blocks were closed: give them anew to order copies", side="client"
)
