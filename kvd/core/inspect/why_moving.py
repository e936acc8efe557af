"""Why of what moves: handoffs by their part or their room, and the peers that they go to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.inspect.answer import MAX_LINKS, Explanation, links_of
from kvd.core.inspect.snapshot import decode_room, prefill_room, waiting_states
from kvd.core.inspect.words import agent_words, layout_words
from kvd.core.layout.shards import lacking, listed
from kvd.core.layout.spec import shards_of
from kvd.core.peers.peer import Life, drain_words
from kvd.errors import Code, Refusal
from kvd.types import short

if TYPE_CHECKING:
    from kvd.core.handoff.parts import ReceivePart, SendPart
    from kvd.core.node import Node
    from kvd.core.peers.peer import Peer
    from kvd.wire.snapshot import RoomState


def of_receive(node: Node, number: int) -> Explanation | Refusal:
    """One part of the decode side; also one that is delivered, while its lease lives."""
    decoder = node.decoder
    part = next((one for one in decoder.known() if one.id == number), None)
    if part is None:
        return Refusal(
            Code.BAD_REQUEST, f"there is no receive {number}: over, or never was; see its events"
        )
    return _handoff(node, [part], [], f"receive:{number}")


def of_send(node: Node, number: int) -> Explanation | Refusal:
    """One part of the prefill side."""
    part = next((one for one in _sends(node) if one.id == number), None)
    if part is None:
        return Refusal(
            Code.BAD_REQUEST, f"there is no send {number}: over, or never was; see its events"
        )
    return _handoff(node, [], [part], f"send:{number}")


def of_room(node: Node, room: int) -> Explanation | Refusal:
    """Every part of a room on this node."""
    decoder = node.decoder
    receives = [one for one in decoder.known() if one.room == room]
    sends = [one for one in _sends(node) if one.room == room]
    if not receives and not sends:
        return Refusal(Code.BAD_REQUEST, f"no open handoff in room {room} on this node")
    return _handoff(node, receives, sends, f"room:{room}")


def _sends(node: Node) -> list[SendPart]:
    prefiller = node.prefiller
    return prefiller.known()


def _handoff(
    node: Node, receives: list[ReceivePart], sends: list[SendPart], asked: str
) -> Explanation:
    """Parts of one room: what each is at, for whom, and what it waits for."""
    parts: list[ReceivePart | SendPart] = [*receives, *sends]
    states = [decode_room(node, part) for part in receives]
    states += [prefill_room(node, part) for part in sends]
    room = states[0].room
    said: list[str] = []
    for part in states:
        said += [_sentence(node, part), *_figures(part), *part.story]
    for waiting in waiting_states(node) if any(part.waiter for part in receives) else ():
        if waiting.room == room:
            said.append(f"in the queue: {waiting.why}")
            said += [f"held by {holder}" for holder in waiting.held_by]
    refs = [f"receive:{one.id}" for one in receives] + [f"send:{one.id}" for one in sends]
    refs = [ref for ref in (*refs, f"room:{room}") if ref != asked]
    leases = [part.lease for part in states if part.lease]
    sessions = [part.session for part in parts if part.session]
    peers = [part.peer for part in states if part.peer]
    marks = [mark for part in parts for mark in part.history.marks(node.out.at_s)]
    return Explanation(
        sentence=said[0],
        facts=tuple(said[1:]),
        links=links_of(
            *refs,
            *[f"lease:{number}" for number in leases],
            *[f"client:{number}" for number in sessions],
            *[f"peer:{name}" for name in peers],
        ),
        marks=tuple(sorted(marks, key=lambda mark: -mark.ago_s)),
    )


def _sentence(node: Node, part: RoomState) -> str:
    direction = "from" if part.side == "decode" else "to"
    owner = f" by {part.owner}" if part.owner else ""
    return (
        f"room {part.room}: {part.state} on the {part.side} side{owner}, "
        f"{direction} {part.peer or 'nobody yet'}, "
        f"for {part.age_s:.1f} s; waits for {part.waiting_for or 'nothing'}"
    )


def _figures(part: RoomState) -> list[str]:
    said = [
        f"prompt {part.prompt_tokens} tokens, decode_prefix_len {part.decode_prefix_len}, "
        f"{part.moved_bytes} of {part.total_bytes} bytes moved"
    ]
    if part.share:
        said.insert(0, part.share)
    if part.side == "prefill":
        said.append(
            f"{part.written_tokens} tokens computed, {part.posted_pages} of {part.total_pages} "
            f"pages posted, {part.outstanding_posts} posts under way"
        )
    return said


# ---- peers ---------------------------------------------------------------------------------------


def of_peer(node: Node, name: str) -> Explanation | Refusal:
    """One other daemon: how it is, since when, and what is open with it."""
    peers = node.peers
    dialed = next((one for one in peers.dialed.values() if one.name == name), None)
    peer = peers.by_name.get(name)
    if peer is None and dialed is None:
        known = ", ".join(peers.names()) or "nobody"
        return Refusal(Code.BAD_REQUEST, f"there is no peer {name!r}: this node knows {known}")
    receives = [one for one in node.decoder.parts.values() if one.peer == name]
    sends = [one for one in _sends(node) if one.peer == name]
    trouble = peers.trouble(name)
    facts = [f"its address is {dialed.address}" if dialed is not None else "it has dialed us"]
    facts += [f"the last handshake failed: {trouble}"] if trouble else []
    facts += _peer_facts(node, peer) if peer is not None else []
    quarantined = [
        one
        for one in node.leases.leases.values()
        if one.quarantine is not None
        and any(writer.peer == name for writer in one.quarantine.writers)
    ]
    if quarantined:
        pages = sum(one.held_pages for one in quarantined)
        facts.append(f"{pages} pages of {len(quarantined)} leases wait for it to settle")
    open_now = f"{len(receives)} receives and {len(sends)} sends under way"
    under_way = [f"receive:{one.id}" for one in receives] + [f"send:{one.id}" for one in sends]
    return Explanation(
        f"{_how(node, name, peer)}, {open_now}",
        tuple(facts),
        links_of(*under_way[:MAX_LINKS], *[f"lease:{one.id}" for one in quarantined[:MAX_LINKS]]),
    )


def _how(node: Node, name: str, peer: Peer | None) -> str:
    if peer is None:
        waited_s = node.out.at_s - node.started_s
        return f"peer {name} has not said Hello in the {waited_s:.1f} s that we have been here"
    silent_s = node.out.at_s - peer.heard_s
    was = "heard" if peer.life is Life.UP else "silent: last heard"
    return (
        f"peer {name} ({short(peer.incarnation)}) is {peer.life.value}, {was} {silent_s:.1f} s ago"
    )


def _shard_facts(node: Node, peer: Peer) -> list[str]:
    """What of the model it has, where that is not what we have, in one shard."""
    ours = shards_of(node.settings.spec)
    if len(ours) == 1 and peer.shards in {ours, ()}:
        return []
    return [
        f"shards: {len(peer.shards)} there, of {listed(lacking(peer.shards, ()))}, and {len(ours)} "
        f"here, of {listed(lacking(ours, ()))}; ours fill {len(peer.outgoing)} of theirs, theirs "
        f"{len(peer.incoming)} of ours"
    ]


def _peer_facts(node: Node, peer: Peer) -> list[str]:
    since_s = node.out.at_s - peer.agent_since_s
    agent = f" for {since_s:.1f} s" if peer.agent_since_s else ""
    drains = drain_words(peer, node.out.at_s)
    return [
        *([drains] if drains else []),
        f"generation {peer.generation} of its transfer process; our agent: {agent_words(peer)}"
        f"{agent}",
        f"layout: {layout_words(peer)}",
        *_shard_facts(node, peer),
        f"round trip {peer.round_trip_s * 1e3:.2f} ms",
    ]
