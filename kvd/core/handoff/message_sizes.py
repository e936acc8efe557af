"""Whether the messages of a handoff fit into one frame each: asked before anything is begun.

An Offer has an id for every page that it grants, the Settled that answers it a sum for every page
that is summed, for each shard, and the aux. One that is longer than its reader takes would be
refused when every byte has landed, and the handoff could only end at its deadline. So the decode
side, which decides what is summed, works out both beforehand; and so does the prefill side, for a
decode side that does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.layout.seal import SUM_BYTES, most_chosen
from kvd.errors import Code, Refusal
from kvd.types import ID_BYTES, amount, count
from kvd.wire.bounds import MAX_PEER_BYTES
from kvd.wire.peer import Integrity

if TYPE_CHECKING:
    from kvd.core.peers.peer import Peer
    from kvd.core.settings import Settings
    from kvd.wire.peer import Offer

MESSAGE_BYTES = 4096
"""Of a message at most, apart from page ids, sums and aux: names, identities, numbers."""

_GRANT_BYTES = 640
"""Of a grant apart from its page ids: a name of 128 characters, and two numbers."""


def page_id_bytes(offer: Offer) -> int:
    """Of its page ids."""
    n_bytes = 0
    for grant in offer.grants:
        n_bytes += len(grant.pages)
    return n_bytes


def is_surely_read(offer: Offer, n_shards: int, aux_bytes: int, limit: int) -> bool:
    """Whether both messages are short, even if every page is summed: true of nearly all."""
    sums = page_id_bytes(offer) // ID_BYTES * SUM_BYTES * n_shards
    return 2 * MESSAGE_BYTES + _GRANT_BYTES * len(offer.grants) + sums + aux_bytes <= limit


def offer_bytes(offer: Offer) -> int:
    """Of the Offer, at most."""
    return MESSAGE_BYTES + _GRANT_BYTES * len(offer.grants) + page_id_bytes(offer)


def settled_bytes(offer: Offer, n_shards: int, aux_bytes: int) -> int:
    """Of the Settled that delivers what ``offer`` asks for, at most.

    ``n_shards``: of the decode side, each of which is summed apart.
    """
    n_bytes = MESSAGE_BYTES + (aux_bytes if offer.share.is_authoritative else 0)
    if offer.integrity is Integrity.OFF:
        return n_bytes
    sums = [most_chosen(offer.integrity, count(grant.pages)) for grant in offer.grants]
    return n_bytes + SUM_BYTES * sum(sums) * n_shards


def _or_raise(limit: int) -> str:
    return ", or raise limits.max_frame_bytes there" if limit < MAX_PEER_BYTES else ""


def long_offer(offer: Offer, reader: Peer | Settings, side: str) -> Refusal | None:
    """Why ``reader``, which is the prefill side, could not read an Offer."""
    n_bytes, limit = offer_bytes(offer), reader.max_frame_bytes
    if n_bytes <= limit:
        return None
    pages = page_id_bytes(offer) // ID_BYTES
    return Refusal(
        Code.TOO_LARGE,
        f"room {offer.room}: {pages} destination pages make an Offer of {amount(n_bytes)}, "
        f"{amount(n_bytes - limit)} more than {reader.name} reads: hand over a shorter prompt, "
        f"or make pool.page_size larger{_or_raise(limit)}",
        side=side,
        numbers={"bytes": n_bytes, "limit": limit, "pages": pages},
    )


def long_settled(offer: Offer, n_shards: int, reader: Peer | Settings, side: str) -> Refusal | None:
    """Why ``reader``, which is the decode side, could not read what it asks for."""
    n_bytes, limit = settled_bytes(offer, n_shards, reader.max_aux_bytes), reader.max_frame_bytes
    if n_bytes <= limit:
        return None
    pages = page_id_bytes(offer) // ID_BYTES
    return Refusal(
        Code.TOO_LARGE,
        f"room {offer.room}: the sums of {pages} pages in {n_shards} shards "
        f"({offer.integrity.value}) and an aux make a message of {amount(n_bytes)}, "
        f"{amount(n_bytes - limit)} more than {reader.name} reads: "
        f'set transfer.integrity = "sampled" or "off" on {reader.name}, hand over '
        f"a shorter prompt, or make pool.page_size larger{_or_raise(limit)}",
        side=side,
        numbers={"bytes": n_bytes, "limit": limit, "pages": pages, "shards": n_shards},
    )
