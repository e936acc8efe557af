"""The transfer process of a simulated host: agents, posts under way, and bytes in its sockets.

It is one process: what it reports comes in order, and what it has not reported when it dies is
never said. A post lands in pieces, and may be slow, stall or fail; a failed post goes on landing
until its agent is destroyed. Then, where the seed says so, the rest is left in the connection of
that agent, and lands later.

A connection is a path of its own, slower or faster than what is said about it: what a dead process
or a destroyed agent had sent arrives piece by piece, in order, and the end of the connection behind
it. What has arrived waits in the receiver's socket until it is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from typing_extensions import override

from kvd.core import effects, inputs
from kvd.core.layout.seal import SUM_BYTES, Seal, chosen, page_sum
from kvd.core.layout.spec import page_bytes
from kvd.sim.contents import TORN
from kvd.sim.node_shell import InboundQuestion, InboundStreams, Stream
from kvd.sim.violation import Violated, require
from kvd.types import page_ids
from kvd.wire.peer import Integrity

if TYPE_CHECKING:
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.peers.peer import Peer
    from kvd.sim.host import SimHost

LANDING_S = 0.002

Agent = tuple[str, int]
"""The incarnation and generation that a sending agent leads to."""


class Flight:
    """Pages on their way from one pool into another."""

    def __init__(self, post: effects.Post, to: SimHost, handoff: int, lease: LeaseRecord) -> None:
        self.post = post.post
        self.agent = (post.incarnation, post.generation)
        self.to = to
        self.handoff = handoff
        self.lease = lease
        """The source's: it must live while its pages are read."""
        self.component = post.component
        self.source = page_ids(post.source)
        self.destination = page_ids(post.destination)
        self.contents: list[int] = []
        """What the source pages held when they were posted: nobody may write them meanwhile."""
        self.sums = b""
        self.done = 0
        """Pages that have landed."""
        self.arrived = 0
        """Of what its sender has left behind: pages that have reached the receiver's sockets."""
        self.pace_s = LANDING_S
        self.is_reported = False
        """Its end, good or bad, is told once."""

    @property
    def is_reachable(self) -> bool:
        """Whether the process that its pages were granted through still serves."""
        to = self.to
        return (
            to.is_up
            and to.transfer.is_alive
            and self.agent == (to.settings.incarnation, to.transfer.generation)
        )

    def land(self, n_pages: int) -> None:
        """So many pages land whole, and the next one in part."""
        first, last = self.done, self.done + n_pages
        to, landing = self.to, self.destination[first : last + 1]
        if not landing:
            return
        require(self.handoff in to.grants, f"{to.name}: handoff {self.handoff} granted nothing")
        to.check_landing(self.handoff, to.grants[self.handoff], self.component, landing)
        memory = to.memory.regions[self.component]
        for k, page in enumerate(landing, start=first):
            memory[page] = self.contents[k] if k < last else TORN
        self.done = min(last, len(self.source))


# ---- connections -----------------------------------------------------------------------------

PIECE_S = 0.3
"""At most, between two pieces of what was left behind."""
RETRY_S = 4.0
"""At most, between two tries of a kernel whose bytes a partition holds back: they come behind what
is said once it is over.
"""
SILENT = 0.03
"""Of the ends: the network or the sender's host is silent, and keepalive finds out."""
KEEPALIVE_S = 10.0
LOOK_S = 0.05
READ_S = 0.2


class Inbound(InboundStreams):
    """The receiving end of one transfer process."""

    def __init__(self, process: SimTransferProcess) -> None:
        super().__init__()
        self.asked = 0
        """Orders that nobody has looked at yet."""
        self.is_alive = True
        self._unread: list[Flight] = []
        """In our own sockets."""
        self._process = process
        self._agenda = process.host.world.agenda
        self._random = process.host.world.rng.random

    def die(self) -> None:
        """Our sockets are gone, and whatever was on its way to them."""
        self.is_alive = False
        self.streams.clear()
        self.questions.clear()
        self._unread.clear()

    # ---- the network -------------------------------------------------------------------------

    @override
    def over(self, stream: Stream) -> None:
        is_silent = self._random() < SILENT
        delay_s = KEEPALIVE_S if is_silent else PIECE_S * self._random()
        self._agenda.after(delay_s, self._arrive, stream)

    def _arrive(self, stream: Stream) -> None:
        if not self.is_alive:
            return
        if self._process.host.is_held_back(stream.name.partition(".")[0]):
            self._agenda.after(RETRY_S * self._random(), self._arrive, stream)
            return
        if not stream.left:
            self.end(stream)
            return
        flight = stream.left[0]
        rest = len(flight.source) - flight.arrived
        flight.arrived += int((rest + 1) * self._random())
        if flight not in self._unread:
            self._unread.append(flight)
            self._agenda.after(READ_S * self._random(), self._read, flight)
        if self._random() < 0.5 or flight.arrived == len(flight.source):
            del stream.left[0]
        self._agenda.after(PIECE_S * self._random(), self._arrive, stream)

    # ---- our sockets -------------------------------------------------------------------------

    def _read(self, flight: Flight) -> None:
        """Some of what waits lands."""
        if flight not in self._unread:
            return
        n_pages = flight.arrived - flight.done
        flight.land(int((n_pages + 1) * self._random()))
        if flight.done < flight.arrived:
            self._agenda.after(READ_S * self._random(), self._read, flight)
        else:
            self._unread.remove(flight)

    # ---- orders ------------------------------------------------------------------------------

    def quiesce(self, order: effects.Quiesce) -> None:
        """Say Quiet when nothing that is in doubt can still land."""
        self.asked += 1
        self._agenda.after(LOOK_S * self._random(), self._look, order)

    def _look(self, order: effects.Quiesce) -> None:
        if self.is_alive:
            self.asked -= 1
            self.look(order)

    @override
    def waits_for(self, question: InboundQuestion) -> None:
        if question.ends:
            ends = tuple(sorted(question.ends))
            self._process.report(inputs.Awaiting, (question.lease,), ends)
        else:
            self._agenda.after(LOOK_S * self._random(), self._quiet, question)

    def _quiet(self, question: InboundQuestion) -> None:
        if question not in self.questions:
            return
        self.questions.remove(question)
        for flight in self._unread:
            flight.land(flight.arrived - flight.done)
        self._unread.clear()
        self._process.report(inputs.Quiet, question.lease)


# ---- paths -----------------------------------------------------------------------------------


class SimPaths:
    """How bytes that leave a device or reach one travel to each peer, as a process has said.

    What it says is about an agent of its own. Whoever believes it of another one, or of one that is
    gone, would look for a slow way where there is none.
    """

    def __init__(self, process: SimTransferProcess) -> None:
        self._process = process
        self._said: dict[Agent, set[tuple[inputs.PathSide, inputs.PathSide, inputs.WritePath]]] = {}

    def arrived(self, agent: Agent) -> None:
        """Bytes of a post have: it may be known by them which way they took."""
        world = self._process.host.world
        share = world.profile.device_paths
        if not share or world.rng.random() >= share:
            return
        source, destination = world.rng.choice(_OF_DEVICES)
        path = world.rng.choice(_PATHS)
        self._said.setdefault(agent, set()).add((source, destination, path))
        bytes_s = 1e9 * (1.0 + world.rng.random())
        self._process.report(inputs.PathFound, *agent, source, destination, path, bytes_s)

    def dropped(self, agent: Agent) -> None:
        """It is gone, and what was seen through it."""
        self._said.pop(agent, None)

    def check(self, peer: Peer) -> None:
        """What the node knows of the ways to a peer is what was said of its agent, once each.

        Raises:
            Violated: It is of another one, or twice there.
        """
        sides = [(way.source, way.destination) for way in peer.ways]
        what = f"{self._process.host.name}: ways to {peer.name}"
        require(len(set(sides)) == len(sides), f"{what} are known twice: {peer.ways}")
        said = self._said.get((peer.incarnation, peer.generation), set())
        for way in peer.ways:
            is_said = (way.source, way.destination, way.path) in said
            is_said |= (way.source, way.destination) not in _OF_DEVICES
            require(is_said, f"{what}: {way.words} was never said of its agent")


_HOST, _DEVICE = inputs.PathSide.HOST, inputs.PathSide.DEVICE
_OF_DEVICES = ((_HOST, _DEVICE), (_DEVICE, _HOST), (_DEVICE, _DEVICE))
_PATHS = tuple(inputs.WritePath)


# ---- the process -----------------------------------------------------------------------------

REPORT_S = 0.0003
START_UP_S = 0.01
COPY_S = 0.1
SLOW_S = 0.4
DAMAGED = 0.03
"""Of the deliveries that are verified in full: one page of it is not what was sent."""


class SimTransferProcess:
    """One transfer process, from its start to its death."""

    def __init__(self, host: SimHost, generation: int) -> None:
        self.host = host
        self.generation = generation
        self.is_alive = True
        self.flights: dict[int, Flight] = {}
        self.copies: list[tuple[effects.Copy, list[int]]] = []
        """To the saved area and back, in order; with what the source held when it was ordered."""
        self._agenda = host.world.agenda
        self._random = host.world.rng.random
        self._told_s = 0.0
        self._loading: dict[Agent, bool] = {}
        """Whether each agent that is being made is still wanted."""
        self._loaded: dict[Agent, Stream | None] = {}
        """The connection of each agent; None where it was made to a process that is gone."""
        self._connections = 0
        self._ahead: dict[int, bytes] = {}
        """By ticket, the sums of what has landed before its Verify."""
        self._said: dict[int, bytes] = {}
        """By ticket, what the writer has said of them before that."""
        self.inbound = Inbound(self)
        self.paths = SimPaths(self)

    def start(self, why: str) -> None:
        """It serves after a while."""
        fields = (self.generation, b"metadata", "simulated", why)
        self.report(inputs.TransferReady, *fields, delay_s=START_UP_S)

    def die(self) -> None:
        """Killed: what it has sent may still come, and its own sockets are gone."""
        self.is_alive = False
        for flight in self.flights.values():
            self._leave_behind(flight)
        for stream in self._loaded.values():
            if stream is not None:
                stream.to.over(stream)
        self._loaded.clear()
        for copy, _ in self.copies[:1]:
            regions = self.host.memory.regions
            regions[copy.destination_region][page_ids(copy.destination)[0]] = TORN
        self.copies.clear()
        self.flights.clear()
        self.inbound.die()

    # ---- reports -----------------------------------------------------------------------------

    def report(self, kind: type[inputs.Input], *fields: object, delay_s: float = REPORT_S) -> None:
        """Report something; never before what was reported earlier."""
        at_s = self._agenda.now_s + delay_s
        at_s = max(at_s, self._told_s)
        self._told_s = at_s
        self._agenda.at(at_s, self._told, kind, fields)

    def _told(self, kind: type[inputs.Input], fields: tuple[object, ...]) -> None:
        if not self.is_alive:
            return
        host, now_s = self.host, self._agenda.now_s
        if host.asleep_until_s > now_s:
            self._agenda.at(host.asleep_until_s, self._told, kind, fields)
        else:
            host.feed(kind(now_s, *fields))  # type: ignore[arg-type]  # of its own kind

    def order(self, order: effects.TransferOrder) -> None:
        """Take an order; what becomes of it is reported when its time has come."""
        if not self.is_alive and not isinstance(order, effects.Quiesce | effects.Exempt):
            return
        match order:
            case effects.LoadAgent():
                self._load_agent(order)
            case effects.DropAgent():
                self._drop_agent(order)
            case effects.Post():
                self._post(order)
            case effects.Forget():
                pass  # no engine here names events, so no post waits for one
            case effects.Verify() | effects.SumLanded() | effects.ForgetSums():
                self._order_sums(order)
            case effects.Quiesce():
                self.inbound.quiesce(order)
            case effects.Exempt():
                self.inbound.exempt(order)
            case effects.Copy():
                source = self.host.memory.regions[order.source_region]
                self.copies.append((order, [source[page] for page in page_ids(order.source)]))
                self._agenda.after(COPY_S * self._random(), self._copied)
            case _:
                assert_never(order)

    # ---- agents ------------------------------------------------------------------------------

    def _load_agent(self, order: effects.LoadAgent) -> None:
        agent = (order.incarnation, order.generation)
        self._loading[agent] = True
        world = self.host.world
        if not world.is_stormy or self._random() >= world.profile.hanging_loads:
            self._agenda.after(0.001 + 0.02 * self._random(), self._built, agent)

    def _built(self, agent: Agent) -> None:
        if not self.is_alive:
            return
        is_wanted = self._loading.pop(agent)
        if self._random() < self.host.world.failing_loads:
            self.report(inputs.AgentFailed, *agent, "no route")
        elif is_wanted:
            stream = self._loaded[agent] = self._connect(agent)
            streams = (stream.name,) if stream is not None else ()
            self.report(inputs.AgentLoaded, *agent, streams)
        if not is_wanted:
            self.report(inputs.AgentDropped, *agent, 0)

    def _connect(self, agent: Agent) -> Stream | None:
        to = self.host.world.owners[agent[0]]
        if not to.is_up or not to.transfer.is_alive:
            return None
        if agent != (to.settings.incarnation, to.transfer.generation):
            return None
        self._connections += 1
        host = self.host
        return to.transfer.inbound.connect(
            f"{host.name}.{host.life}.{self.generation}:{self._connections}>{to.name}"
        )

    def _drop_agent(self, order: effects.DropAgent) -> None:
        agent = (order.incarnation, order.generation)
        if agent in self._loading:
            self._loading[agent] = False
            return
        doubtful = 0
        for flight in [flight for flight in self.flights.values() if flight.agent == agent]:
            del self.flights[flight.post]
            self._fail(flight, "agent destroyed")
            doubtful += self._leave_behind(flight)
        stream = self._loaded.pop(agent, None)
        self.paths.dropped(agent)
        if stream is not None:
            stream.to.over(stream)
        self.report(inputs.AgentDropped, *agent, doubtful)

    # ---- posts -------------------------------------------------------------------------------

    def _post(self, post: effects.Post) -> None:
        part = self.host.node.prefiller.posts.parts.get(post.post)
        if part is None or part.engine is None:
            return  # the same step has already ended it
        world = self.host.world
        flight = Flight(post, world.owners[post.incarnation], part.handoff, part.engine.lease)
        units = flight.to.memory.kinds.units * post.split
        require(self.host.memory.kinds.units == units, f"post {post.post} cuts pages otherwise")
        memory = self.host.memory.regions[post.component]
        flight.contents = [memory[page] for page in flight.source]
        flight.sums = _sums(post.seal, post.first_page, flight.contents)
        if flight.agent not in self._loaded:
            self._fail(flight, "no sending agent")
            return
        self.flights[post.post] = flight
        weather = world.profile
        dice = self._random() if world.is_stormy else 1.0
        if dice < weather.stalled_posts:
            return  # nothing of it ever lands
        if dice < weather.stalled_posts + weather.slow_posts:
            flight.pace_s = SLOW_S
        self._agenda.after(flight.pace_s * self._random(), self._land, flight)

    def _land(self, flight: Flight) -> None:
        """Some more pages arrive; at the last one the end is reported."""
        if self.flights.get(flight.post) is not flight:
            return  # its agent is destroyed, or this process is dead
        if not flight.is_reachable:
            self._fail(flight, "the receiving process is gone")
            return
        if flight.to.is_held_back(self.host.name):
            self._agenda.after(RETRY_S * self._random(), self._land, flight)
            return
        world = self.host.world
        dice = self._random()
        if world.is_stormy and dice < world.profile.failing_posts:
            self._fail(flight, "injected")
        left = len(flight.source) - flight.done
        # Most land at once; some stop in the middle of a page, and go on.
        self._check_source(flight)
        if dice < 0.7:
            flight.land(left)
        else:
            flight.land(int(left * self._random()))
        if flight.done == len(flight.source):
            del self.flights[flight.post]
            if not flight.is_reported:
                flight.is_reported = True
                self.paths.arrived(flight.agent)
                self.report(inputs.PostDone, flight.post, self._bytes(flight), flight.sums)
        else:
            if not flight.is_reported:
                self.report(inputs.PostMoved, flight.post, self._bytes(flight), flight.done)
            self._agenda.after(flight.pace_s * self._random(), self._land, flight)

    def _check_source(self, flight: Flight) -> None:
        lease, memory = flight.lease, self.host.memory.regions[flight.component]
        if self.host.node.leases.leases.get(lease.id) is not lease or lease.reads < 1:
            raise Violated(f"{self.host.name}: post {flight.post} reads the ended lease {lease.id}")
        for page, wanted in zip(flight.source, flight.contents, strict=True):
            if memory[page] != wanted:
                raise Violated(
                    f"{self.host.name}: page {page} of {flight.component} of lease {lease.id} was "
                    f"overwritten while post {flight.post} read it"
                )

    def _fail(self, flight: Flight, why: str) -> None:
        """Its agent still exists, so more of it may land."""
        if not flight.is_reported:
            flight.is_reported = True
            self.report(inputs.PostFailed, flight.post, why)

    def _bytes(self, flight: Flight) -> int:
        return flight.done * self._page_bytes(flight.component) // self.host.memory.kinds.units

    def _page_bytes(self, component: str) -> int:
        spec = self.host.settings.spec
        return page_bytes(spec.components[spec.index(component)])

    # ---- copies ------------------------------------------------------------------------------

    def _copied(self) -> None:
        if not self.is_alive:
            return
        copy, contents = self.copies.pop(0)
        world = self.host.world
        if world.is_stormy and self._random() < world.profile.failing_posts:
            self.report(inputs.CopyFailed, copy.ticket, "injected")
            return
        regions = self.host.memory.regions
        source, destination = regions[copy.source_region], regions[copy.destination_region]
        if [source[page] for page in page_ids(copy.source)] != contents:
            raise Violated(f"{self.host.name}: pages of copy {copy.ticket} overwritten under it")
        for page, content in zip(page_ids(copy.destination), contents, strict=True):
            destination[page] = content
        component = copy.source_region.removesuffix(".saved")
        moved_bytes = len(copy.source) // 4 * self._page_bytes(component)
        self.report(inputs.Copied, copy.ticket, moved_bytes)

    # ---- what is left behind -------------------------------------------------------------------

    def _leave_behind(self, flight: Flight) -> int:
        """What was sent and not confirmed may land later; returns how many bytes may."""
        stream = self._loaded.get(flight.agent)
        if stream is None or self._random() >= self.host.world.profile.doubts:
            return 0
        flight.arrived = flight.done
        stream.left.append(flight)
        return 1

    # ---- sums ------------------------------------------------------------------------------------

    def _order_sums(self, order: effects.Verify | effects.SumLanded | effects.ForgetSums) -> None:
        match order:
            case effects.Verify():
                self._agenda.after(0.05 * self._random(), self._verify, order)
            case effects.SumLanded():
                memory = self.host.memory.regions[order.component]
                landed = [memory[page] for page in page_ids(order.pages)[: order.landed]]
                found = self._ahead[order.ticket] = _sums(order.seal, order.seal.first, landed)
                said = self._said[order.ticket] = self._said.get(order.ticket, b"") + order.sums
                if order.summed and found.startswith(said):
                    self._agenda.after(
                        0.05 * self._random(), self._tell_good, order.ticket, order.summed
                    )
            case effects.ForgetSums(ticket):
                self._ahead.pop(ticket, None)
                self._said.pop(ticket, None)

    def _tell_good(self, ticket: int, n_pages: int) -> None:
        if self.is_alive:
            self.report(inputs.LandedGood, ticket, n_pages)

    def _verify(self, effect: effects.Verify) -> None:
        if not self.is_alive:
            return
        seal, world = effect.seal, self.host.world
        memory = self.host.memory.regions[effect.component]
        is_risky = world.is_stormy and world.profile.failing_posts > 0
        is_damaged = is_risky and seal.integrity is Integrity.FULL and self._random() < DAMAGED
        # Another component of it may have been found damaged: then these are others' pages now.
        if is_damaged and effect.ticket in self.host.node.decoder.verifying.parts:
            memory[page_ids(effect.pages)[-1]] = TORN
        sums = _sums(seal, seal.first, [memory[page] for page in page_ids(effect.pages)])
        # What was summed ahead is not looked at again: it must have been whole then.
        ahead = self._ahead.pop(effect.ticket, b"") if not is_damaged else b""
        self._said.pop(effect.ticket, None)
        sums = ahead + sums[len(ahead) :]
        bad = tuple(
            int(page)
            for k, page in enumerate(chosen(seal, seal.first, seal.end))
            if sums[k * SUM_BYTES :][:SUM_BYTES] != effect.sums[k * SUM_BYTES :][:SUM_BYTES]
        )
        self.report(inputs.Verified, effect.ticket, bad)


def _sums(seal: Seal, first_page: int, contents: list[int]) -> bytes:
    """Of these pages, as a transfer process reports them."""
    if seal.is_open:
        return b""
    wanted = chosen(seal, first_page, first_page + len(contents)).tolist()
    return b"".join(
        page_sum(
            seal, page, [contents[page - first_page].to_bytes(8, "little", signed=True)]
        ).to_bytes(SUM_BYTES, "little")
        for page in wanted
    )
