"""Pages that have arrived, until our transfer process has said that they are what was sent.

The writer's Settled(DELIVERED) brings its sums; our own transfer process sums what lies in the
pages and compares, off the loop. The answer ends the wait, and nothing else does: the writer has
settled, so nobody writes the pages any more, and no timer is needed to be safe. A transfer process
that ends meanwhile takes the question along; its successor is asked again.

What must not live here: transitions, and what becomes of the pages (``decode``).
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np

from kvd.core import effects
from kvd.core.seal import SUM_BYTES, chosen
from kvd.errors import Code, Refusal
from kvd.types import ID_BYTES, Pages
from kvd.wire import events

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvd.core.inputs import Verified
    from kvd.core.lease import Lease
    from kvd.core.parts import DecodePart
    from kvd.core.peer import Peers
    from kvd.core.settings import Settings

SHOWN_PAGES = 8
"""Of the wrong pages, in a sentence and an event."""

ADVICE = (
    "nothing of it was cached: send it again, and if that fails too, test the memory and the "
    "network of both hosts"
)


class Finding(enum.Enum):
    """What is known of a part's pages, where they are not known to be wrong."""

    ASKED = "asked"
    GOOD = "good"


class Verifying:
    """Asks about the pages of delivered parts, and puts the answers into words."""

    def __init__(self, settings: Settings, peers: Peers, out: effects.Outbox) -> None:
        self._settings = settings
        self._component = settings.spec.components[0]
        self._peers = peers
        self._out = out

    def begin(self, part: DecodePart, checksums: bytes) -> Finding | Refusal:
        """Every byte has landed; ``checksums`` is what the writer says of them."""
        seal = part.seal
        if seal.is_open:
            return Finding.GOOD
        wanted_bytes = SUM_BYTES * chosen(seal, seal.first, seal.end).size
        if len(checksums) != wanted_bytes:
            return self._unsummed(part, len(checksums), wanted_bytes)
        part.sums = checksums
        n_pages = wanted_bytes // SUM_BYTES
        part.story.tell(self._out.at_s, f"{n_pages} of {seal.end - seal.first} pages to verify")
        if self._peers.generation:
            self._ask(part)
        return Finding.ASKED

    def ask_again(self, parts: Iterable[DecodePart]) -> None:
        """The transfer process that was asked about ``parts`` is gone, and a new one serves."""
        for part in parts:
            self._ask(part)

    def judge(self, part: DecodePart, got: Verified) -> Finding | Refusal:
        """Our transfer process has looked."""
        checked = len(part.sums) // SUM_BYTES
        part.sums = b""
        if got.why:
            return Refusal(
                Code.CORRUPT,
                f"room {part.room} from {part.peer} cannot be verified: {got.why}",
                side=self._settings.name,
            )
        if not got.bad_pages:
            return Finding.GOOD
        return self._corrupt(part, got.bad_pages, checked)

    def _ask(self, part: DecodePart) -> None:
        if part.lease is not None:
            self._out.effects.append(
                effects.Verify(
                    part.id,
                    self._component.name,
                    part.seal,
                    _delta(part, part.lease),
                    part.sums,
                )
            )

    def _unsummed(self, part: DecodePart, got_bytes: int, wanted_bytes: int) -> Refusal:
        mode, n_pages = part.seal.integrity.value, part.seal.end - part.seal.first
        return Refusal(
            Code.CORRUPT,
            f"room {part.room}: {part.peer} sent {got_bytes} bytes of page sums where "
            f"{wanted_bytes} are needed ({mode}, {n_pages} pages), so nothing of it can be "
            "verified: run the same version of kvd on both nodes, or set transfer.integrity = "
            '"off" here to take what it sends unverified',
            side=self._settings.name,
            numbers={"checksums_bytes": got_bytes, "needed_bytes": wanted_bytes},
        )

    def _corrupt(self, part: DecodePart, bad_pages: tuple[int, ...], checked: int) -> Refusal:
        """Name the wrong pages, in a refusal and an event."""
        seal, size, out = part.seal, self._component.page_size, self._out
        total, n_bad = seal.end - seal.first, len(bad_pages)
        shown = bad_pages[:SHOWN_PAGES]
        pages: tuple[int, ...] = ()
        if part.lease is not None:
            ids = np.frombuffer(_delta(part, part.lease), dtype="<i4")
            pages = tuple(int(ids[logical - seal.first]) for logical in shown)
        named = ", ".join(
            f"page {page} (page {logical} of the prompt, tokens "
            f"[{logical * size}, {min((logical + 1) * size, part.prompt_tokens)}))"
            for page, logical in zip(pages, shown, strict=True)
        )
        more = f" and {n_bad - len(shown)} more" if n_bad > len(shown) else ""
        why = (
            f"room {part.room} from {part.peer}: {n_bad} of {checked} verified pages "
            f"({seal.integrity.value}, {total} were sent) are not what was sent: {named}{more}; "
            f"{ADVICE}"
        )
        out.emit(
            events.PagesCorrupt(
                out.next_seq(),
                out.at_s,
                part.id,
                part.room,
                part.peer,
                self._component.name,
                pages,
                shown,
                n_bad,
                checked,
                total,
                why,
            )
        )
        return Refusal(
            Code.CORRUPT,
            why,
            side=self._settings.name,
            numbers={
                "bad_pages": n_bad,
                "checked_pages": checked,
                "total_pages": total,
                "pages": " ".join(map(str, pages)),
                "logical_pages": " ".join(map(str, shown)),
                "page_size": size,
            },
        )


def _delta(part: DecodePart, lease: Lease) -> Pages:
    """The pages that the writer wrote, which are neither cached nor reserve."""
    return Pages(lease.row[part.seal.first * ID_BYTES : part.seal.end * ID_BYTES])
