"""What the transfer process reports, and what that means for the parts that are being sent.

A post that is done lets its part go on. A post that failed ends its part, but stays outstanding
until its sending agent is destroyed: its bytes are in doubt until then. The agent's end takes every
other post through it along.

What must not live here: transitions and Settled (``send``, ``settled``), choosing what to
post (``posts``), the life of an agent (``agents``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.handoff.posts import NOTHING_AHEAD
from kvd.core.handoff.send import WRITING
from kvd.core.peers.peer import Agent
from kvd.errors import Code, Refusal
from kvd.wire.peer import Progress

if TYPE_CHECKING:
    from kvd.core.handoff.parts import SendPart
    from kvd.core.handoff.send import Prefiller
    from kvd.core.inputs import (
        AgentDropped,
        AgentFailed,
        AgentLoaded,
        PathFound,
        PostDone,
        PostFailed,
        PostMoved,
        Unposted,
    )
    from kvd.core.outbox import Outbox
    from kvd.core.peers.peer import Peer
    from kvd.core.peers.registry import Peers
    from kvd.core.peers.ways import Ways
    from kvd.core.settings import Settings


@mypyc_attr(allow_interpreted_subclasses=True)
class Transfers:
    """Takes the reports of one transfer process after the other."""

    def __init__(
        self, settings: Settings, prefiller: Prefiller, peers: Peers, ways: Ways, out: Outbox
    ) -> None:
        self._settings = settings
        self._prefiller = prefiller
        self._posts = prefiller.posts
        self._peers = peers
        self._ways = ways
        self._out = out

    # ---- posts -------------------------------------------------------------------------------

    def post_moved(self, got: PostMoved) -> None:
        """A running post has moved so much."""
        part = self._posts.note_moved(got.post, got.moved_bytes, got.pages)
        if part is None or (part.after and not got.moved_bytes):
            return  # its event has come, that is all
        # A part that drains tells nothing: nobody over there looks any more.
        if part.state in WRITING:
            # What is done and what this one has moved: posts beside it are told with their own
            # reports.
            self._tell_progress(part, part.moved_bytes + got.moved_bytes)

    def post_done(self, got: PostDone) -> None:
        """Every byte of the post has landed."""
        # Before it is over, which may end the send, and with it the lease.
        self._posts.note_written(got.post)
        self._over(got.post, got.moved_bytes, got.sums)

    def post_failed(self, got: PostFailed) -> None:
        """Its bytes are in doubt: only the end of its sending agent makes them certain."""
        part = self._posts.parts.get(got.post)
        if part is not None:
            # Given up before its agent is dropped: with DRAINING nothing more is posted through
            # it. The post itself stays outstanding until AgentDropped says that it cannot write.
            self._prefiller.give_up_send(part, self._failed(got.why))
            self._peers.drop_agent(part.incarnation, part.generation, got.why)

    def unposted(self, got: Unposted) -> None:
        """It never began, so nothing is in doubt, and the agent serves others as before."""
        part = self._posts.parts.get(got.post)
        if part is not None:
            # Given up first, here and in ``agent_dropped``: a part that is FLUSHING with nothing
            # outstanding would count as delivered.
            self._prefiller.give_up_send(part, self._failed(got.why))
            self._over(got.post, 0)

    # ---- agents ------------------------------------------------------------------------------

    def agent_loaded(self, got: AgentLoaded) -> None:
        """Post what waited for the agent."""
        # A report about an agent of another generation is about one that nobody posts through.
        peer = self._peers.current(got.incarnation, got.generation)
        if peer is None or not self._peers.agents.loaded(peer, got.streams):
            return
        self._ways.loaded(peer, got)
        for part in self._prefiller.parts_offered_by(got.incarnation):
            if part.state in WRITING:
                self._prefiller.push_part(part)

    def path_found(self, got: PathFound) -> None:
        """How bytes of a device travel to a peer."""
        peer = self._peers.current(got.incarnation, got.generation)
        if peer is not None and peer.agent is Agent.LOADED:
            self._ways.found(peer, got)

    def agent_failed(self, got: AgentFailed) -> None:
        """The agent could not be made."""
        peer = self._peers.current(got.incarnation, got.generation)
        if peer is not None and self._peers.agents.failed(peer, got.why):
            self.no_agent(peer)

    def no_agent(self, peer: Peer) -> None:
        """Nothing can be posted to this peer, as ``agent_why`` says."""
        why = f"no sending agent: {peer.agent_why}"
        for part in self._prefiller.parts_offered_by(peer.incarnation):
            # A part with nothing left to post needs no agent: a full hit has none.
            if part.state in WRITING and not part.is_posted:
                self._prefiller.give_up_send(part, self._failed(why))

    def agent_dropped(self, got: AgentDropped) -> None:
        """We send nothing more through that agent: its posts are over."""
        # A list of ids, made first: each that ends leaves the posts.
        for post in self._posts.posts_through(got.incarnation, got.generation):
            part = self._posts.parts[post]
            # Before the post is over: with the last one Settled leaves, and tells it.
            part.in_doubt = part.in_doubt or got.unconfirmed_bytes > 0
            self._prefiller.give_up_send(part, self._failed("its agent was destroyed"))
            self._over(post, 0)
        # Last: a living peer gets its next agent at once, and none of these parts may post there.
        peer = self._peers.current(got.incarnation, got.generation)
        if peer is not None:
            self._peers.agents.dropped(peer)

    # ---- processes ---------------------------------------------------------------------------

    def gone(self) -> None:
        """Our transfer process is reaped: every agent of it is destroyed.

        How much of each post had been sent died with it, so all of it is in doubt.
        """
        for post, part in list(self._posts.parts.items()):
            # Of every post, though some may have sent nothing: nobody is left who could say so.
            part.in_doubt = True
            self._prefiller.give_up_send(
                part, self._failed("the transfer process of this node ended")
            )
            self._over(post, 0)

    def generation_changed(self, peer: Peer) -> None:
        """The decode side's receiving process was replaced: granted pages are out of reach."""
        for part in self._prefiller.parts_offered_by(peer.incarnation):
            # An Offer of the new generation may have overtaken its Hello, and waits for it: it is
            # not over.
            if part.generation < peer.generation:
                why = (
                    f"{peer.name} restarted its transfer process: generation "
                    f"{part.generation} is over, {peer.generation} serves"
                )
                self._prefiller.give_up_send(part, self._failed(why))

    # ---- small things ------------------------------------------------------------------------

    def _over(self, post: int, moved_bytes: int, sums: bytes = b"") -> None:
        part = self._posts.end_post(post, moved_bytes, sums)
        if part is not None:
            # Before the part settles: what comes after Settled is not heard any more.
            if part.state in WRITING:
                self._tell_progress(part, part.moved_bytes)
            self._prefiller.post_over(part)

    def _tell_progress(self, part: SendPart, moved_bytes: int) -> None:
        peer = self._peers.by_incarnation.get(part.incarnation)
        if peer is not None:
            landed = self._posts.landed(part)
            ahead = self._posts.sums_ahead(part) if landed else NOTHING_AHEAD
            self._out.send(
                peer.link,
                Progress(
                    source=self._settings.incarnation,
                    target=part.incarnation,
                    handoff=part.handoff,
                    moved_bytes=moved_bytes,
                    landed=landed,
                    summed=ahead.summed,
                    checksums=ahead.checksums,
                ),
            )

    def _failed(self, why: str) -> Refusal:
        return Refusal(Code.POST_FAILED, why, side=self._settings.name)
