"""Concerns about what should move: handoffs and the peers they go to.

A part that is waited for by nobody but its own node costs two comparisons, so a thousand of them
are looked at in a millisecond.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.console.concern import HIGH, LOW, MEDIUM, Concern, amount, first_seen
from kvd.core.handoff.protocol import Decode, Prefill
from kvd.core.peers.peer import Agent, Life

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.console.scene import Scene
    from kvd.core.handoff.parts import ReceivePart, SendPart

STUCK_S = 2.0
"""A handoff under way moves at least this often."""
LONG_S = 5.0
"""Waiting for an engine longer than this is more than its turn to compute."""
LATE = 0.2
"""The last fifth of the time that a handoff has."""
DIAL_S = 2.0
"""A configured peer answers within this, if it is there."""

_RECEIVING = {Decode.OFFERED, Decode.RECEIVING, Decode.VERIFYING}
_SENDING = {Prefill.AWAIT_ENGINE, Prefill.AWAIT_OFFER, Prefill.STREAMING, Prefill.FLUSHING}

_MOVES = f"a handoff under way moves at least every {STUCK_S:g} s"


def receives(scene: Scene) -> Iterator[Concern]:
    """Those that do not move, and those that will be late."""
    now_s = scene.now_s
    seen = scene.progress.receives
    for part in scene.node.decoder.parts.values():
        if part.state not in _RECEIVING:
            continue
        found = seen.get(part.id)
        moved_s = found[1] if found is not None else now_s
        if now_s - moved_s > STUCK_S:
            yield _still_receive(scene, part, moved_s)
        if part.deadline_s - now_s < LATE * (part.deadline_s - part.since_s):
            yield _late(scene, f"receive:{part.id}", part, part.moved_bytes)


def sends(scene: Scene) -> Iterator[Concern]:
    """The same of the other side; and those whose receiver does not end them."""
    now_s, prefiller = scene.now_s, scene.node.prefiller
    seen = scene.progress.sends
    for part in prefiller.known():
        found = seen.get(part.id)
        moved_s = found[1] if found is not None else now_s
        if now_s - moved_s > STUCK_S:
            yield _still_send(scene, part, moved_s)
        is_late = part.deadline_s - now_s < LATE * (part.deadline_s - part.since_s)
        if is_late and part.state in _SENDING:
            yield _late(scene, f"send:{part.id}", part, prefiller.posts.live_bytes(part))


def peers(scene: Scene) -> Iterator[Concern]:
    """Those that are silent, differ, or cannot be sent to."""
    known = scene.node.peers
    for peer in known.by_name.values():
        ref = f"peer:{peer.name}"
        if peer.life is not Life.UP:
            kind, grave = ("peer-lost", HIGH) if peer.life is Life.LOST else ("peer-silent", MEDIUM)
            why = known.trouble(peer.name)
            yield Concern(
                grave,
                kind,
                ref,
                f"{peer.name} is {peer.life.value}{f': {why}' if why else ''}",
                peer.heard_s,
                f"a peer is heard every {scene.node.settings.heartbeat_s:g} s",
                f"look whether kvd runs on {peer.name}, and at the network between the two",
            )
        elif peer.refusal is not None and peer.source_refusal is not None:
            yield Concern(
                MEDIUM,
                "peer-refused",
                ref,
                peer.refusal.message,
                first_seen(scene, "peer-refused", ref),
                "peers that exchange KV have the same layout of their pools",
                "compare kvd config show on both nodes",
            )
        elif peer.agent is Agent.FAILED:
            yield Concern(
                HIGH,
                "peer-refused",
                ref,
                f"no sending agent: {peer.agent_why}",
                peer.agent_since_s,
                "there is a sending agent towards every peer that lives",
                f"open {ref}",
            )
    yield from _unanswered(scene)


def _unanswered(scene: Scene) -> Iterator[Concern]:
    known = scene.node.peers
    if scene.now_s - scene.node.started_s < DIAL_S:
        return
    for dialed in known.dialed.values():
        if dialed.name in known.by_name:
            continue
        ref = f"peer:{dialed.name}"
        why = dialed.trouble or "nobody answers"
        yield Concern(
            MEDIUM,
            "peer-refused" if dialed.trouble else "peer-silent",
            ref,
            f"{dialed.name} at {dialed.address} has not said Hello: {why}",
            dialed.trouble_s or scene.node.started_s,
            "a configured peer is there, and its keys are those we know",
            f"look whether kvd runs on {dialed.name} as configured in peers.connect",
        )


# ---- one handoff ---------------------------------------------------------------------------------


def _late(scene: Scene, ref: str, part: ReceivePart | SendPart, done_bytes: int) -> Concern:
    whole = f" of {part.total_bytes}" if part.total_bytes else ""
    return Concern(
        MEDIUM,
        "late-handoff",
        ref,
        f"room {part.room} with {part.peer or 'nobody yet'}: {part.state.value}, "
        f"{done_bytes}{whole} bytes",
        part.deadline_s - LATE * (part.deadline_s - part.since_s),
        "a handoff is done before the last fifth of its time",
        f"open {ref}",
    )


def _silence(scene: Scene, incarnation: str) -> str:
    """Its peer, if that is what is wrong with it."""
    peer = scene.node.peers.by_incarnation.get(incarnation)
    return f"; {peer.name} is {peer.life.value}" if peer and peer.life is not Life.UP else ""


def _still_receive(scene: Scene, part: ReceivePart, moved_s: float) -> Concern:
    silence = _silence(scene, part.incarnation)
    grave = MEDIUM if scene.now_s - moved_s > LONG_S else LOW
    match part.state:
        case Decode.OFFERED:
            what = "its pages are offered, and the prefill engine has not begun"
        case Decode.VERIFYING:
            what, grave = "its pages are verified by our transfer process", MEDIUM
        case _:
            what = (
                f"{part.moved_bytes} of {part.total_bytes} bytes, and nothing since: the prefill "
                "engine does not compute, or bytes have stopped"
            )
    return Concern(
        HIGH if silence else grave,
        "stuck-handoff",
        f"receive:{part.id}",
        f"room {part.room} from {part.peer}: {what}{silence}",
        moved_s,
        _MOVES,
        f"open peer:{part.peer}" if silence else f"open receive:{part.id}",
    )


def _still_send(scene: Scene, part: SendPart, moved_s: float) -> Concern:
    silence = _silence(scene, part.incarnation)
    is_long = scene.now_s - moved_s > LONG_S
    grave, what, action = _what_keeps(scene, part, is_long=is_long)
    return Concern(
        HIGH if silence else grave,
        "stuck-handoff",
        f"send:{part.id}",
        f"room {part.room} to {part.peer or 'nobody yet'}: {what}{silence}",
        moved_s,
        _MOVES,
        f"open peer:{part.peer}" if silence else action,
    )


def _what_keeps(scene: Scene, part: SendPart, *, is_long: bool) -> tuple[str, str, str]:
    """How grave it is, what is wrong, and what to do."""
    after_its_turn = MEDIUM if is_long else LOW
    engine, peer = f"open client:{part.session}", f"open peer:{part.peer}"
    if part.outstanding:
        moved = scene.node.prefiller.posts.live_bytes(part)
        what = (
            f"{amount(len(part.outstanding), 'post')} under way, "
            f"{moved} of {part.total_bytes} bytes, and nothing since: bytes have stopped"
        )
        return HIGH, what, peer
    match part.state:
        case Prefill.AWAIT_ENGINE:
            what = "its pages are offered, and no engine here has begun to send"
            return after_its_turn, what, f"open send:{part.id}"
        case Prefill.AWAIT_OFFER:
            what = "the engine here sends, and no decode side has offered pages"
            return after_its_turn, what, f"open send:{part.id}"
        case Prefill.SETTLED:
            return MEDIUM, "all is sent, and the decode side does not end it", peer
        case _:
            pass
    found = scene.node.peers.by_incarnation.get(part.incarnation)
    if found is not None and found.agent is not Agent.LOADED:
        return MEDIUM, f"there is no sending agent yet ({found.agent.value})", peer
    what = (
        f"{part.cursor_tokens} of {part.prompt_tokens} tokens computed, and nothing since: the "
        "engine does not compute"
    )
    return after_its_turn, what, engine
