"""Concerns about the daemon itself: its transfer process, its recorder, its loop, its callers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.console.concern import HIGH, LOW, MEDIUM, Concern, first_seen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.console.scene import Scene

REFUSED_OVER_S = 10.0
MANY_REFUSED = 10
"""So many messages refused in that time are more than a restart or a mistake."""
LAG_S = 0.1
LONG_LAG_S = 0.5


def transfer(scene: Scene) -> Iterator[Concern]:
    """Without a transfer process nothing can be sent or received."""
    if not scene.node.peers.generation:
        yield Concern(
            HIGH,
            "transfer-down",
            "",
            "the transfer process of this node does not serve",
            first_seen(scene, "transfer-down"),
            "there is a transfer process; one that ends is started again at once",
            "look at the daemon's log: it says why the last one ended",
        )


def draining(scene: Scene) -> Iterator[Concern]:
    """A node that was taken out of service, and may have been forgotten so."""
    drainer = scene.node.drainer
    if drainer.drain is not None:
        receives, sends = drainer.under_way()
        yield Concern(
            LOW,
            "draining",
            "",
            f"{drainer.words()}: {len(receives)} receives and {len(sends)} sends under way",
            drainer.drain.since_s,
            "a node serves; one that drains refuses every new lease, receive and send",
            "kvd undrain serves again, unless it is stopping",
        )


def refused(scene: Scene) -> Iterator[Concern]:
    """Somebody keeps sending what cannot be acted on."""
    lately = []
    for one in reversed(scene.recent.refused):
        if scene.now_s - one.at_s > REFUSED_OVER_S:
            break
        lately.append(one)
    if len(lately) < MANY_REFUSED:
        return
    last = lately[0]
    more = " or more" if len(lately) == scene.recent.refused.maxlen else ""
    yield Concern(
        LOW,
        "refused-messages",
        "",
        f"{len(lately)}{more} messages refused within {REFUSED_OVER_S:g} s; the last on "
        f"{last.socket} from {last.sender}: {last.code}, {last.why}",
        lately[-1].at_s,
        "engines, operators and peers send what the daemon can read and act on",
        "look for message-refused among the events: each says who sent it, and why it was refused",
    )


def recorder(scene: Scene) -> Iterator[Concern]:
    """A flight recorder that has lost the thread."""
    state = scene.node.recorded.state
    if state.state == "ended":
        yield Concern(
            LOW,
            "recorder-ended",
            "",
            state.why or "the flight recorder has ended",
            scene.node.recorded.since_s,
            "where the recorder is enabled, every input is recorded",
            "restart the daemon when it is idle, to record again",
        )


def loop(scene: Scene) -> Iterator[Concern]:
    """Everybody waits when the loop does."""
    if scene.lag_s >= LAG_S:
        yield Concern(
            MEDIUM if scene.lag_s >= LONG_LAG_S else LOW,
            "loop-lag",
            "",
            f"its timer was late by {scene.lag_s * 1e3:.0f} ms, at worst in the last second",
            first_seen(scene, "loop-lag"),
            f"the daemon answers within {LAG_S * 1e3:.0f} ms",
            "look at the processor of this host: pin the daemon, or give it a core of its own",
        )
