"""One seed: nodes, engines, a router, a network and its weather; then calm, and a verdict.

    storm            requests arrive and things go wrong, until so many steps are done
    calm             nothing goes wrong any more, nothing new arrives; everything must end
    empty            engines leave; no page is held, no lock is left
    once more        a handoff between every pair that has a link must work

Everything is drawn from one ``random.Random(seed)``; ``digest`` is over every effect and event.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import xxhash

from kvd.core.layout.quota import Quota
from kvd.core.node import NodeState
from kvd.core.settings import Demotion, KvEventSettings, Settings, TierSettings
from kvd.sim.agenda import Agenda
from kvd.sim.contents import PAGE_TOKENS, Contents, WrittenPrompt
from kvd.sim.copying import COPYING
from kvd.sim.engine import Request
from kvd.sim.faults import Faults
from kvd.sim.host import SimHost
from kvd.sim.network import Network
from kvd.sim.node_shell import incarnation
from kvd.sim.pool import pool_of
from kvd.sim.receiving import PullingEngine, ReceivingEngine
from kvd.sim.sending import SimSendingEngine
from kvd.sim.violation import Violated, require
from kvd.types import ID_BYTES, NodeName, Tokens
from kvd.wire.events import Moved, Violation
from kvd.wire.peer import Integrity

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.core.effects import Step
    from kvd.core.inputs import Input
    from kvd.sim.engine import EngineJob
    from kvd.sim.profile import Profile
    from kvd.sim.storage import SimDisk

    MakeNode = Callable[[Settings, float], NodeState]

RECENT = 60
"""Inputs that are shown of a seed that fails."""

QUIET_S = 40.0
"""Longest time that everything may take to end when nothing goes wrong any more."""

AGAIN_S = 150.0
"""Longest time until a handoff works: an agent that was unlucky rests for 64 s at most."""

MOST_JOBS = 12
"""Of one engine at once."""

SHARED = 0.15
"""Of the requests at a node with several prefill nodes, those that more than one sends."""

TAPE = np.arange(8192, dtype="<i4").tobytes()
"""Token ids to cut prompts from."""


class World:
    """One simulation. ``make_node`` makes each node; a test may give it a broken one."""

    def __init__(
        self, seed: int, profile: Profile, n_nodes: int, make_node: MakeNode = NodeState
    ) -> None:
        self.rng = random.Random(seed)
        self.profile = profile
        self.make_node = make_node
        self.agenda = Agenda()
        self.network = Network(self.agenda, self.rng, profile)
        self.contents = Contents()
        self.is_stormy = True
        self.failing_loads = profile.failing_loads
        self.steps = 0
        self.recent: deque[tuple[str, Input]] = deque(maxlen=RECENT)
        self.outcomes: Counter[str] = Counter()
        """How jobs ended."""
        self.edges: set[tuple[str, str, str]] = set()
        """Transitions that were taken: before, trigger, after."""
        self.sent: dict[bytes, SimSendingEngine] = {}
        self.arrivals = 0
        """How often an engine has heard that some of a prompt is here."""
        self.delivered: set[bytes] = set()
        self.joined: set[tuple[int, str]] = set()
        """Rooms received from several hosts, with each of these: the aux of one travels."""
        self.left: set[int] = set()
        """Rooms whose decode engine has left: what was being verified is kept without it."""
        self.owners: dict[str, SimHost] = {}
        """By incarnation."""
        self.faults = Faults(self)
        self._digest = xxhash.xxh3_128()
        self._encode = msgspec.msgpack.Encoder().encode
        self._asked: list[WrittenPrompt] = []
        self._rooms = 0
        self.epochs: dict[str, int] = {}
        """How often each base had new weights."""
        self.quiet_until_s = 0.0
        """When requests arrive again, where they come in bursts."""
        self.store: SimDisk[int] | None = None
        """Of all hosts, where they share one."""
        self.hosts = [self._host(k, n_nodes) for k in range(n_nodes)]
        for k, host in enumerate(self.hosts):
            host.dials = [other for other in self.hosts[:k] if self._has_link(host, other)]
        for host in self.hosts:
            self.start(host)
        self.agenda.after(0.1, self._arrive)
        self.faults.schedule()

    @property
    def digest(self) -> str:
        """Of every effect and event so far."""
        return self._digest.hexdigest()

    # ---- hosts -------------------------------------------------------------------------------

    def _host(self, number: int, n_nodes: int) -> SimHost:
        """The first half serve prefill as ``p0``, ``p1``..., the others decode as ``d0``..."""
        n_prefill = max(1, n_nodes // 2)
        name = f"p{number}" if number < n_prefill else f"d{number - n_prefill}"
        settings = Settings(
            NodeName(name),
            incarnation(name, 0),
            pool_of(self.profile, name, self.rng),
            suspect_s=1.0,
            lost_s=2.0,
            forget_s=self.profile.forget_s,
            max_deadline_s=6.0,
            overtakers=self.rng.choice((0, 0, 3)),
            stall_s=1.5,
            min_bytes_per_s=1,
            sum_ahead_bytes=1,
            load_limit_s=2.0,
            fence_after_s=self.rng.choice((0.0, 0.0, 3.0)),
            drain_s=1.0,
            linger_s=5.0,
            integrity=self.rng.choice(
                (Integrity.OFF, Integrity.OFF, Integrity.SAMPLED, Integrity.FULL)
            ),
        )
        if self.profile.tier_objects:
            settings = msgspec.structs.replace(settings, tiers=self._tiers())
        if self.profile.has_quotas:
            tier = settings.tiers[0]
            settings = msgspec.structs.replace(
                settings,
                quotas=self._quotas(settings.spec.pages[0]),
                tiers=(msgspec.structs.replace(tier, quotas=self._quotas(tier.capacity_bytes)),),
            )
        if self.profile.has_routers:
            told = KvEventSettings("CPU", most_tokens=self.rng.choice((16, 100, 65_536)))
            settings = msgspec.structs.replace(settings, kv_events=told)
        return SimHost(self, settings)

    def _tiers(self) -> tuple[TierSettings, ...]:
        """Objects of one byte each, and few of them under way at a time."""
        if self.profile.shares_tier:
            return (self._store(),)
        if self.profile.has_store_below:
            return (self._disk(), self._store())
        return (self._disk(),)

    def _store(self) -> TierSettings:
        rng = self.rng
        return msgspec.structs.replace(
            self._tier("store", Demotion.ALWAYS, Demotion.SECOND_USE, Demotion.PRIORITY),
            is_shared=True,
            absent_s=rng.choice((0.0, 2.0)),
            lifetime_s=rng.choice((1.0, 20.0)),
            probe_s=rng.choice((0.0, 0.2)),
            stop_s=rng.choice((0.0, 1.0)),
        )

    def _disk(self) -> TierSettings:
        made = self._tier("disk", Demotion.ALWAYS, Demotion.ALWAYS, Demotion.SECOND_USE)
        return msgspec.structs.replace(made, share_beside_handoffs=0.25)

    def _tier(self, name: str, *demotions: Demotion) -> TierSettings:
        rng = self.rng
        return TierSettings(
            name=name,
            capacity_bytes=rng.choice(self.profile.tier_objects),
            object_bytes=1,
            demotion=rng.choice(demotions),
            wait_s=rng.choice((0.1, 1.0)),
            deadline_s=2.0,
            max_moving_bytes=rng.choice((1, 4, 32)),
        )

    def _quotas(self, n_pages: int) -> tuple[Quota, ...]:
        """For some of the namespaces that ``_prompt`` draws; all floors fit, or nearly so."""
        found = []
        for namespace in ("", "lora"):
            floor = self.rng.choice((0, n_pages // 8, n_pages // 2))
            ceiling = self.rng.choice((None, floor, floor + n_pages // 4))
            if self.rng.random() < 0.8:
                found.append(Quota(namespace, floor, ceiling))
        return tuple(found)

    def _has_link(self, host: SimHost, other: SimHost) -> bool:
        """Decode nodes dial prefill nodes."""
        return host.name[0] == "d" and other.name[0] == "p"

    def start(self, host: SimHost) -> None:
        """A daemon starts: it dials, and those that dial it connect again."""
        host.start()
        self.owners[host.settings.incarnation] = host
        host.dial()
        for other in self.hosts:
            if host in other.dials and other.is_up:
                self.network.connect(other, host)

    # ---- what happens ------------------------------------------------------------------------

    def watch(self, host: SimHost, step: Step) -> None:
        """After every step that did something, before its effects are carried out.

        Raises:
            Violated: The node itself says that an invariant does not hold.
        """
        self._digest.update(self._encode(step))
        for event in step.events:
            if isinstance(event, Moved):
                self.edges.add((event.before, event.trigger, event.after))
            elif isinstance(event, Violation):
                raise Violated(f"{host.name}, by its own audit: {event.what}")

    def concluded(self, _: EngineJob, outcome: str) -> None:
        """A job is over."""
        self.outcomes[outcome] += 1

    def sent_by(self, job: SimSendingEngine) -> bytes:
        """A new aux, which names the send behind it."""
        aux = str(len(self.sent)).encode()
        self.sent[aux] = job
        return aux

    def heard_of(self, prompt: WrittenPrompt) -> None:
        """A sequence that a later request may go on from."""
        if prompt.n_tokens < 160:
            self._asked.append(prompt)

    # ---- the router --------------------------------------------------------------------------

    def some_tokens(self, n_tokens: int) -> Tokens:
        """So many tokens, few enough different ones that sequences meet again."""
        first = 1000 * self.rng.randint(1, 3)
        return Tokens(TAPE[first * ID_BYTES : (first + n_tokens) * ID_BYTES])

    def a_recent_room(self) -> int:
        """A room that may still be open."""
        return max(1, self._rooms - self.rng.randint(0, 8))

    def _arrive(self) -> None:
        """A request arrives at the router, and the next one after a while."""
        if not self.is_stormy:
            return
        rng, profile = self.rng, self.profile
        decoders = [host for host in self.hosts if host.dials]
        decode = rng.choice(decoders)
        sources = [rng.choice(decode.dials)]
        if len(decode.dials) > 1 and rng.random() < SHARED:
            sources = rng.sample(decode.dials, rng.randint(2, len(decode.dials)))
        if profile.pulls and rng.random() < profile.pulls:
            request = msgspec.structs.replace(self._request(sources[:1], decode), room=0)
            self.agenda.after(0.1 * rng.random(), self._begin, decode, PullingEngine, request)
            self._arrive_again(len(decoders))
            return
        request = self._request(sources, decode)
        lonely = rng.random()
        if lonely > profile.lonely / 2:
            for prefill in sources:
                self.agenda.after(
                    0.1 * rng.random(), self._begin, prefill, SimSendingEngine, request
                )
        if request.room and (lonely < profile.lonely / 2 or lonely > profile.lonely):
            if rng.random() < profile.lonely / 4:
                prompt = WrittenPrompt(self.contents, request.prompt.tokens, "another")
                request = msgspec.structs.replace(request, prompt=prompt)
            self.agenda.after(0.1 * rng.random(), self._begin, decode, ReceivingEngine, request)
        self._arrive_again(len(decoders))

    def _arrive_again(self, decoders: int) -> None:
        rng, profile = self.rng, self.profile
        rate = profile.requests_per_s * decoders
        wait_s = rng.expovariate(rate)
        if profile.quiet_s and rng.random() * rate * profile.burst_s < 1.0:
            wait_s += rng.expovariate(1 / profile.quiet_s)
            self.quiet_until_s = self.agenda.now_s + wait_s
        self.agenda.after(wait_s, self._arrive)

    def _request(self, sources: list[SimHost], decode: SimHost) -> Request:
        rng = self.rng
        room = 0
        if rng.random() > 0.03:
            self._rooms += 1
            room = self.a_recent_room() if rng.random() < self.profile.lonely else self._rooms
        return Request(
            room=room,
            prompt=self._prompt(),
            sources=tuple([source.name for source in sources]),
            priority=rng.choice((0, 0, 1)),
            deadline_s=rng.choice(self.profile.deadlines_s),
            cache=rng.random() < 0.9,
            to=decode.name if room % 2 else None,
        )

    def _prompt(self) -> WrittenPrompt:
        """A prompt that shares its beginning with others, or goes on from one, or is one again."""
        rng, asked = self.rng, self._asked
        dice = rng.random()
        if self.profile.family == "recurrent":
            prompt = self._whole_prompt()
        elif asked and dice < 0.3:
            return rng.choice(asked[-12:])
        elif asked and dice < 0.5:
            prompt = rng.choice(asked[-12:]).followed_by(self.some_tokens(rng.randint(1, 40)))
        else:
            shared = TAPE[: rng.choice((0, 32, 64, 70)) * ID_BYTES]
            tokens = Tokens(shared + self.some_tokens(rng.randint(1, 100)))
            prompt = WrittenPrompt(self.contents, tokens, rng.choice(("", "", "lora")))
        self.heard_of(prompt)
        return prompt

    def _whole_prompt(self) -> WrittenPrompt:
        """The same for states: whole pages mostly, since only their states are kept for others."""
        rng, asked = self.rng, self._asked
        n_tokens = rng.choice((rng.randint(1, 60), 16, 32, 48))
        whole = [prompt for prompt in asked[-12:] if prompt.n_tokens % PAGE_TOKENS == 0]
        if whole and rng.random() < 0.7:
            return rng.choice(whole).followed_by(self.some_tokens(n_tokens))
        return WrittenPrompt(
            self.contents, self.some_tokens(n_tokens), rng.choice(("", "", "lora"))
        )

    def _begin(
        self,
        host: SimHost,
        kind: type[SimSendingEngine | ReceivingEngine],
        request: Request,
    ) -> None:
        if host.is_up and len(host.session.jobs) < MOST_JOBS:
            copying = self.profile.copying
            if copying and self.rng.random() < copying:
                kind = COPYING.get(kind, kind)
            job = kind(host.session, request)
            if self.rng.random() < self.profile.fickle:
                self.agenda.after(self.rng.random(), job.change_mind)

    # ---- from the storm to the verdict -------------------------------------------------------

    def run(self, steps: int, audit_steps: int) -> None:
        """The whole seed: ``steps`` of storm, and what follows; an audit every ``audit_steps``.

        Raises:
            Violated: Something that must never be was seen.
        """
        audit_at, agenda = audit_steps, self.agenda
        while self.steps < steps:
            agenda.step()
            if self.steps >= audit_at:
                audit_at = self.steps + audit_steps
                self.audit()
        self.is_stormy = False
        self.failing_loads = 0.0
        self.network.heal()
        self._settle()
        self._empty()
        self._hand_over_once_more()

    def audit(self) -> None:
        """Every check of every node that is up."""
        for host in self.hosts:
            if host.is_up:
                host.audit()

    def _run_for(self, seconds: float) -> None:
        agenda = self.agenda
        until_s = agenda.now_s + seconds
        while agenda.now_s < until_s:
            agenda.step()

    def _settle(self) -> None:
        """Everything that is under way ends by itself."""
        until_s = self.agenda.now_s + QUIET_S
        while True:
            self._run_for(0.5)
            left = [what for host in self.hosts for what in _unfinished(host)]
            if not left:
                break
            if self.agenda.now_s > until_s:
                raise Violated(f"{QUIET_S:.0f} s of calm have not ended: {'; '.join(left)}")
        self.audit()

    def _empty(self) -> None:
        """The engines leave; nothing is held for nobody."""
        for host in self.hosts:
            host.hang_up()
            table = host.node.leases
            require(not table.leases, f"{host.name}: leases of nobody: {list(table.leases)}")
            locked = [node.describe() for node in table.tree.nodes() if node.lock_ref]
            require(not locked, f"{host.name}: locked by nobody: {locked}")
            require(
                table.headroom_pages == table.capacity_pages,
                f"{host.name}: {table.headroom_pages} of {table.capacity_pages} pages obtainable",
            )
            for keeper in table.components.each:
                kept = keeper.pool.total_pages - 1 - keeper.headroom_pages
                require(not kept, f"{host.name}: {kept} pages of {keeper.component.name} kept")
            host.attach()
        self.audit()

    def _hand_over_once_more(self) -> None:
        """After all that, every pair that has a link can still do its work."""
        until_s = self.agenda.now_s + AGAIN_S
        pairs = [(decode, prefill) for decode in self.hosts for prefill in decode.dials]
        while pairs:
            require(
                self.agenda.now_s < until_s,
                f"no handoff works any more: {[(d.name, p.name) for d, p in pairs]}",
            )
            tries = []
            for decode, prefill in pairs:
                self._rooms += 1
                tokens = self.some_tokens(100)
                prompt = WrittenPrompt(self.contents, tokens, f"last {self._rooms}")
                request = Request(
                    room=self._rooms,
                    prompt=prompt,
                    sources=(prefill.name,),
                    priority=0,
                    deadline_s=2.0,
                    cache=True,
                )
                tries.append((request, decode, prefill))
                SimSendingEngine(prefill.session, request)
                ReceivingEngine(decode.session, request)
            for _ in range(12):
                self._run_for(0.5)
                done = {self.sent[aux].request.room for aux in self.delivered}
                pairs = [(d, p) for request, d, p in tries if request.room not in done]
                if not pairs:
                    break
        self.audit()


def _unfinished(host: SimHost) -> list[str]:
    """What is still under way at a host, in words."""
    node = host.node
    if not host.is_up:
        return [f"{host.name} is down"]
    places = {
        "jobs": host.session.jobs,
        "calls": host.session.calls,
        "receives": node.decoder.open.parts,
        "outcomes": node.decoder.outcomes.kept,
        "rooms": node.prefiller.rooms.by_room,
        "offers behind": node.prefiller.rooms.behind,
        "sends": node.prefiller.by_send,
        "settled": node.prefiller.settled_sends.settled,
        "handoffs": node.prefiller.settled_sends.records,
        "failed sends": node.prefiller.failed,
        "posts": node.prefiller.posts.parts,
        "waiting": node.admission.queue,
        "leases": node.leases.leases,
        "copies": node.copies.under_way,
        "copies of engines": list(node.engine_copies),
        "engines that die": host.deaf,
        "fetches": node.fetcher.turns,
        "orders of storage": node.tiers.moves.under_way,
        "questions to a store": node.tiers.promotions.probes.under_way,
    }
    left = [f"{host.name}: {len(place)} {name}" for name, place in places.items() if place]
    if host.epochs.kept != host.world.epochs:
        left.append(f"{host.name}: epochs {host.epochs.kept} of {host.world.epochs}")
    quieting = host.transfer.inbound.asked + len(host.transfer.inbound.questions)
    if quieting:
        left.append(f"{host.name}: {quieting} orders to say quiet")
    return left
