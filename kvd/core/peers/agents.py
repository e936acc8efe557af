"""The sending agent towards each peer: made, used, destroyed, made again.

An agent belongs to one incarnation and one transport generation of its peer. Destroying it is the
only true abort: it proves that no byte leaves for that peer any more, which neither the end of a
post nor a timer does. So a failed post destroys its agent, and the posts beside it fail with it.

    NONE -> LOADING -> LOADED -> DROPPING -> NONE, and again while the peer lives
               '-> FAILED -> NONE, and again after a while

What a peer says of itself is loaded into our own transfer process, and may be what kills it. So an
agent that was LOADING when that process ended has FAILED, and rests twice as long each time; and
nothing is loaded for a peer that is lost.

When the peer is replaced, or starts another generation, its agent is destroyed without waiting for
the end: nobody posts through it any more, and the new one has another name.

What must not live here: posts and parts (``handoff.posts``); whether a peer lives (``registry``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core import effects
from kvd.core.peers.peer import RETRY_S, Agent, Life
from kvd.wire import events

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvd.core.outbox import Outbox
    from kvd.core.peers.peer import Peer


MAX_REST_S = 30.0
"""Longest rest of an agent during whose loading our transfer process ended, again and again."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Agents:
    """Moves the ``agent`` of every peer. ``is_serving``: our own transfer process can make one."""

    def __init__(self, load_limit_s: float, out: Outbox) -> None:
        self.is_serving = False
        self._load_limit_s = load_limit_s
        self._out = out

    def load(self, peer: Peer) -> None:
        """Make a sending agent where there is none and the layouts agree."""
        # What a peer says may be what ended our last process: nothing of a lost one is loaded
        # again.
        is_wanted = peer.refusal is None and peer.life is not Life.LOST
        if peer.agent is Agent.NONE and is_wanted and self.is_serving:
            self._set(peer, Agent.LOADING, "")
            self._out.effects.append(
                effects.LoadAgent(peer.incarnation, peer.generation, peer.metadata)
            )

    def drop(self, peer: Peer, why: str) -> None:
        """Destroy the sending agent: every post through it fails, and no byte leaves later."""
        # Only a loaded one has posts; one that is LOADING fails by itself, DROPPING is under way.
        if peer.agent is Agent.LOADED:
            self._set(peer, Agent.DROPPING, why)
            self._destroy(peer)

    def leave(self, peer: Peer) -> None:
        """The incarnation or generation is over: destroy its agent, and be ready for another."""
        # Also one that is LOADING: it may be done by now, and its report finds nobody who waits.
        if peer.agent in {Agent.LOADING, Agent.LOADED}:
            self._destroy(peer)
        peer.agent = Agent.NONE

    def loaded(self, peer: Peer, streams: tuple[str, ...]) -> bool:
        """The agent can post, over these connections; False where nobody waits for it."""
        # The report may be of a load that we stopped waiting for, and have ordered the end of.
        is_awaited = self._end_loading(peer, Agent.LOADED, "")
        if peer.agent is Agent.LOADED:
            peer.streams = streams
        if is_awaited:
            # It was made, so what it is made of did not kill our process: the next rest is a short
            # one again.
            peer.agent_rest_s = RETRY_S
        return is_awaited

    def failed(self, peer: Peer, why: str) -> bool:
        """The agent could not be made; False where nobody waits for it."""
        return self._end_loading(peer, Agent.FAILED, why)

    def is_overdue(self, peer: Peer) -> bool:
        """Whether it was LOADING for longer than anybody waits: it has FAILED then."""
        waited_s = self._out.at_s - peer.agent_since_s
        if peer.agent is not Agent.LOADING or waited_s < self._load_limit_s:
            return False
        # Ordered though it may never come to be: if it is made after all, nobody would ever end it.
        self._destroy(peer)
        self._set(peer, Agent.FAILED, f"it was not made within {waited_s:.1f} s")
        return True

    def dropped(self, peer: Peer) -> None:
        """The agent is destroyed; a living peer gets a new one."""
        peer.streams, peer.ways = (), ()
        # A peer that was replaced meanwhile has an agent of its own by now.
        if peer.agent is Agent.DROPPING:
            self._set(peer, Agent.NONE, "")
            # Only now: two agents of one name would be one to the transfer process.
            self.load(peer)

    def gone(self, peers: Iterable[Peer]) -> None:
        """Our transfer process is reaped, and all agents with it."""
        self.is_serving = False
        for peer in peers:
            peer.streams, peer.ways = (), ()
            if peer.agent is Agent.LOADING:
                self._set(peer, Agent.FAILED, "the transfer process ended while it was loading")
                # It may be what killed the process: twice the rest each time, or it would kill each
                # one.
                peer.agent_rest_s = min(2 * peer.agent_rest_s, MAX_REST_S)
            # A FAILED one goes on resting: the end of our process says nothing about why it failed.
            elif peer.agent is not Agent.FAILED:
                peer.agent = Agent.NONE

    def retry(self, peer: Peer) -> None:
        """Make an agent that failed once more, when it has rested and its peer lives."""
        rested_s = self._out.at_s - peer.agent_since_s
        is_due = peer.agent is Agent.FAILED and rested_s >= peer.agent_rest_s
        if is_due and self.is_serving and peer.life is not Life.LOST:
            peer.agent = Agent.NONE
            self.load(peer)

    def _end_loading(self, peer: Peer, agent: Agent, why: str) -> bool:
        if peer.agent is not Agent.LOADING:
            return False
        self._set(peer, agent, why)
        return True

    def _destroy(self, peer: Peer) -> None:
        peer.ways = ()
        peer.streams = ()  # claimed no more, from before its end on
        self._out.effects.append(effects.DropAgent(peer.incarnation, peer.generation))

    def _set(self, peer: Peer, agent: Agent, why: str) -> None:
        peer.agent = agent
        peer.agent_why = why
        peer.agent_since_s = self._out.at_s
        self._out.emit(
            events.AgentChanged(
                peer=peer.name,
                incarnation=peer.incarnation,
                generation=peer.generation,
                state=agent.value,
                why=why,
            )
        )
