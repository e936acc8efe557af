"""A journal as a dict: what the notes of a node make of it, and whether that is what is so.

``perform`` takes the effects of a step in their order, so it knows at each of them what the next
process would find if this one died there. ``agree`` compares it with the node between two steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvd.core import effects
from kvd.core.cache.lease import ENGINE, LASTING
from kvd.types import ID_BYTES, Tokens, count, page_ids
from kvd.wire import client
from kvd.wire.peer import Offer

if TYPE_CHECKING:
    from kvd.core.node import NodeState
    from kvd.types import Pages
    from kvd.wire.client import Reply


class Cached(NamedTuple):
    """One cached page, and where it belongs."""

    namespace: str
    before: int
    index: int
    tokens: Tokens


class Noted:
    """By page: how it is cached, and which lease has it. By lease: its session and its anchor."""

    def __init__(self, page_size: int, component: str) -> None:
        self.cached: dict[int, Cached] = {}
        """The ones that were cached first come first."""
        self.holder: dict[int, int] = {}
        self.leases: dict[int, tuple[int, int]] = {}
        self.arenas: set[int] = set()
        """Of ``leases``, those whose pages a peer may write while their engine has them."""
        self._page_bytes = page_size * ID_BYTES
        self._component = component

    def perform(self, effect: effects.Effect) -> None:
        """One effect: a note is taken down, and who is given pages must find them noted so."""
        match effect:
            case effects.NoteHeld():
                self._held(effect)
            case effects.NoteCached():
                self._cached(effect)
            case effects.NoteFreed(pages=pages):
                self._freed(pages)
            case effects.NoteEnded(lease=lease):
                del self.leases[lease]
            case effects.AnswerEngine(session=session, message=message):
                self._answered(session, message)
            case effects.SendToPeer(message=Offer(grants=grants)):
                granted = b"".join(grant.pages for grant in grants)
                # An arena's are its engine's after a restart too: no peer writes through that.
                kept = {self.holder.get(page, 0) for page in self._kept(granted)}
                assert kept <= self.arenas, "a peer may write what is somebody's"
            case effects.Copy(destination_region=region, destination=pages):
                is_cached = self.cached.keys() & set(page_ids(pages))
                assert region != self._component or not is_cached, "a copy writes the cache"
            case _:
                pass

    def _held(self, note: effects.NoteHeld) -> None:
        assert not self._kept(note.pages), "held while they are somebody's"
        assert not note.anchor or note.anchor in self.cached
        for page in page_ids(note.pages):
            self.holder[page] = note.lease
        self.leases[note.lease] = (note.session, note.anchor)

    def _cached(self, note: effects.NoteCached) -> None:
        assert bool(note.pages) == bool(note.tokens)
        before = note.before
        if note.first:
            known = self.cached[before]
            assert (known.namespace, known.index) == (note.namespace, note.first - 1)
        else:
            assert before == 0
        size = self._page_bytes
        assert len(note.tokens) == count(note.pages) * size
        for k, page in enumerate(page_ids(note.pages)):
            assert self.holder.pop(page, note.lease) == note.lease
            assert page not in self.cached, "cached twice"
            toks = Tokens(note.tokens[k * size : (k + 1) * size])
            self.cached[page] = Cached(note.namespace, before, note.first + k, toks)
            before = page
        if note.lease:
            assert not note.anchor or note.anchor in self.cached
            self.leases[note.lease] = (self.leases[note.lease][0], note.anchor)

    def _freed(self, pages: Pages) -> None:
        for page in page_ids(pages):
            self.cached.pop(page, None)
            self.holder.pop(page, None)

    def _kept(self, pages: bytes) -> set[int]:
        return set(page_ids(pages)) & (self.cached.keys() | self.holder.keys())

    def _answered(self, session: int, message: Reply) -> None:
        """Who is told of pages may use them: each is cached, or noted as that session's."""
        match message:
            case client.Leased() | client.PageTable() | client.Received() | client.Resumed():
                pages = page_ids(message.pages)
            case _:
                return
        own = {lease for lease, (of, _) in self.leases.items() if of == session}
        wrong = [one for one in pages if one not in self.cached and self.holder[one] not in own]
        assert not wrong, f"{type(message).__name__} names pages {wrong}, which are another's"

    def agree(self, node: NodeState) -> None:
        """It says of every page and every lease what the node says."""
        assert self.cached == tree_of(node)
        held, leases = {}, {}
        everything = node.leases.leases
        self.arenas = {one.id for one in everything.values() if one.is_arena}
        for lease in everything.values():
            arena = everything.get(lease.lent.arena) if lease.lent is not None else None
            if arena is not None and ENGINE in arena.holders:
                held |= dict.fromkeys(page_ids(lease.held), arena.id)
            if lease.anchor is None:
                continue
            # What an engine copies stays noted as its own after it has let go.
            if ENGINE in lease.holders or lease.holders & LASTING:
                held |= dict.fromkeys(page_ids(lease.held), lease.id)
            if ENGINE in lease.holders:
                path = page_ids(node.leases.tree.path_pages(lease.anchor))
                leases[lease.id] = (lease.session, path[-1] if path else 0)
        assert self.holder == held
        assert self.leases == leases


def tree_of(node: NodeState) -> dict[int, Cached]:
    """What is cached, page by page."""
    tree = node.leases.tree
    size = tree.match_page_tokens * ID_BYTES
    found = {}
    for edge in tree.nodes():
        path = page_ids(tree.path_pages(edge))
        index = len(path) - edge.n_pages
        for k, page in enumerate(path[index:]):
            before = path[index + k - 1] if index + k else 0
            toks = Tokens(edge.edge[k * size : (k + 1) * size])
            found[page] = Cached(edge.namespace, before, index + k, toks)
    return found
