"""Sieges without a daemon: the core itself, the order socket's codec, the metadata of transports.

The core is given what sockets would give it, and every answer is owed once; the codecs are given
bytes, and raise their one typed error or nothing.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from kvd.core import effects, inputs
from kvd.core.audit.invariants import violations
from kvd.core.cache.lease_state import LeaseStage
from kvd.core.handoff.offer import prompt_digest
from kvd.core.inspect.snapshot import snapshot
from kvd.core.layout.geometry import PieceRow
from kvd.core.layout.spec import PoolSpec, fingerprint
from kvd.core.node import NodeState
from kvd.errors import Code, Refusal
from kvd.transfer.metadata import VERSION, BadMetadata, Metadata, RegionNote, pack, unpack
from kvd.transfer.orders import BadStream, Frames, Order, Report, order_of, reports_of
from kvd.types import NO_TOKENS, Tokens, pack_ids
from kvd.wire import admin, client, peer
from kvd.wire.codec import ADMIN_REQUESTS, CLIENT_REQUESTS, PEER_MESSAGES
from tests.core.families import SPECS
from tests.core.side import settings, spec, tokens
from tests.fault.fuzz_values import Maker, kinds_of

CHECK_EVERY = 64
ROOMS = list(range(1, 12))
PROMPT = tokens((1, 100))
PROMPTS = [PROMPT] * 5 + [tokens((1, n)) for n in (1, 10, 16, 40)] + [tokens((-5, 40))]
SERVED_BY_THE_SHELL = (client.Subscribe, client.Unsubscribe, admin.ListEvents)
NAMES = ("m1", "m2", "m3")
COPY_REFUSED = "refused by the siege"
"""Only a fault of ours makes the transfer process refuse a copy, so this alone may be internal."""
POOLS = {"mha": spec(64), **SPECS}


class CoreSiege:
    """One node, hostile sessions, peers and operators, and a transfer process that often fails."""

    def __init__(self, seed: int, pool: PoolSpec) -> None:
        self.make = Maker(seed)
        self.fed: Counter[str] = Counter()
        self.answers = self.reports = self.questions = 0
        self._now_s = 100.0
        self._node = NodeState(settings("d", 64, spec=pool), self._now_s)
        self._owed: dict[int, dict[int, client.Request]] = {}
        self._calls = 0
        self._sessions = 0
        self._lives = 0
        self._current: dict[str, str] = {}
        self._handoffs = 1000
        self._generation = 0
        self._later: list[inputs.Input] = []
        known = self.make.known
        known |= {name: [1, 2, 3] for name in ("lease", "send", "receive", "of", "id")}
        known |= {"room": list(ROOMS), "handoff": list(range(1, 30)), "generation": [1, 1, 2]}
        known |= {"source": [], "target": [self._node.settings.incarnation] * 9 + [""]}
        layout = fingerprint(self._node.settings.spec)
        in_shards = f"{layout[:-1]},[[0,1,0,1],[0,1,0,1]]]"
        known |= {"layout": [layout, layout, in_shards], "protocol": [1]}
        known |= {"digest": [prompt_digest(PROMPT, "")], "prompt_tokens": [100]}
        known |= {"start_tokens": [0], "end_tokens": [100], "decode_prefix_len": [0]}
        known |= {"component": ["kv"], "pages": [pack_ids(list(range(1, 8)))]}
        known |= {"outcome": ["delivered", "aborted"], "namespace": [""], "upto_tokens": [40, 100]}
        known |= {"kind": ["page", "node", "room", "lease"], "deadline_s": [0.1, 0.5, 2.0]}
        known |= {"side": ["decode", "prefill"], "ask": list(range(1, 20))}
        known |= {"keep": ["host", "nothing"], "tier": [None] * 4 + ["host", "device"]}
        self._serve()
        for name in NAMES:
            self._greet(name)

    def storm(self, count: int) -> None:
        """Feed so many inputs, then let time pass: what waits ends, and every call is answered."""
        for number in range(count):
            self._one()
            if not number % CHECK_EVERY:
                self.check()
        self._let_pass(100.0)
        unanswered = {session: calls for session, calls in self._owed.items() if calls}
        assert not unanswered, unanswered
        assert self.reports == self.questions, "an operator was not answered, or twice"
        for session in list(self._owed):
            self._feed(inputs.ClientHungUp(self._now_s, session))
        self._owed.clear()
        self._let_pass(20.0)
        self._settle()
        left = snapshot(self._node).leases
        assert not left, left

    def _let_pass(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.1)):
            self._now_s += 0.1
            self._feed(inputs.Tick(self._now_s))
            self._transfer()
        self.check()

    def _settle(self) -> None:
        """No peer says Settled to what was aborted; a fence proves that none can write."""
        self.questions += 1
        self._feed(inputs.FromOperator(self._now_s, b"op", admin.Fence(1)))
        self._let_pass(1.0)

    def check(self) -> None:
        """Every invariant, and that whoever watches can be shown the state."""
        found = violations(self._node)
        assert not found, found
        msgspec.json.encode(snapshot(self._node))

    def _one(self) -> None:
        rng = self.make.rng
        self._now_s += rng.choice((0.0, 0.0, 0.001, 0.02, 0.3))
        match rng.randrange(20):
            case 0 | 1:
                self._feed(inputs.Tick(self._now_s))
            case 2 | 3:
                self._transfer()
            case 4 if rng.random() < 0.2:
                self._come_and_go()
            case 5 if rng.random() < 0.2:
                self._greet(rng.choice(NAMES))
            case 6:
                self._operator()
            case 7 if rng.random() < 0.3:
                self._meet()
            case 8 if rng.random() < 0.5:
                self._move()
            case 7 | 8 | 9 | 10 | 11:
                self._peer()
            case _:
                self._engine()

    def _meet(self) -> None:
        """A handoff begins as it should: what follows meets machines in the middle of it."""
        rng = self.make.rng
        session, room, name = rng.choice(list(self._owed)), rng.choice(ROOMS), rng.choice(NAMES)
        mine, link = self._node.settings.incarnation, f"in:{name.encode().hex()}"
        if rng.random() < 0.4:
            self._ask(session, client.ReceiveRequest(self._next_call(), room, (name,)), PROMPT)
            return
        self._ask(session, client.OpenLease(self._next_call()), PROMPT)
        lease = self.make.known["lease"][-1]
        self._ask(session, client.SendRequest(self._next_call(), room, lease), PROMPT)
        self._handoffs += 1
        self.make.known["handoff"] = [*self.make.known["handoff"][-30:], self._handoffs]
        grants = (peer.Grant("kv", 0, 100, pack_ids(list(range(1, 8)))),)
        offer = peer.Offer(
            *(self._current[name], mine, self._handoffs, room, 1, 100, 0),
            *(prompt_digest(PROMPT, ""), grants, 2.0),
        )
        self._feed(inputs.FromPeer(self._now_s, link, offer))
        send = self.make.known["send"][-1]
        self._ask(session, client.Advance(self._next_call(), send, 40))

    def _move(self) -> None:
        """KV is copied within the node: what follows meets copies that are under way."""
        rng = self.make.rng
        leases = [one for one in self._node.leases.leases.values() if one.session in self._owed]
        if not leases or rng.random() < 0.3:
            session = rng.choice(list(self._owed))
            self._ask(session, client.OpenLease(self._next_call()), PROMPT)
            self._ask(session, client.CommitLease(self._next_call(), self.make.known["lease"][-1]))
            return
        lease = rng.choice(leases)
        call = self._next_call()
        if rng.random() < 0.3:
            is_out = lease.state is LeaseStage.RETRACTED
            kind = client.ResumeLease if is_out else client.RetractLease
            self._ask(lease.session, kind(call, lease.id))
            return
        pages, ahead = (pack_ids(rng.sample(range(7), rng.randint(0, 3))) for _ in range(2))
        self._ask(lease.session, client.FetchPages(call, lease.id, pages, ahead))

    def _next_call(self) -> int:
        self._calls += 1
        return self._calls

    def _ask(self, session: int, message: client.Request, toks: Tokens = NO_TOKENS) -> None:
        self._owed[session][message.call] = message
        self._feed(inputs.FromClient(self._now_s, session, message, toks))

    def _engine(self) -> None:
        kind = self.make.rng.choice(kinds_of(client.Request))
        call = self._next_call()
        message = CLIENT_REQUESTS.decode(self.make.frame(kind, call=call, source=["m1"]))
        if isinstance(message, (Refusal, *SERVED_BY_THE_SHELL)) or message.call != call:
            return
        session = self.make.rng.choice(list(self._owed))
        takes = isinstance(message, client.TAKES_TOKENS)
        self._ask(session, message, self.make.rng.choice(PROMPTS) if takes else NO_TOKENS)

    def _operator(self) -> None:
        kind = self.make.rng.choice(kinds_of(admin.AdminRequest))
        message = ADMIN_REQUESTS.decode(self.make.frame(kind, call=1))
        if isinstance(message, (Refusal, *SERVED_BY_THE_SHELL)):
            return
        if isinstance(message, admin.Fence) and self.make.rng.random() < 0.9:
            return  # it ends every handoff
        before = self.reports
        self.questions += 1
        self._feed(inputs.FromOperator(self._now_s, b"op", message))
        # These wait: for peers, and until it is on disk.
        is_at_once = not isinstance(message, admin.AskOtherEnd | admin.RaiseEpoch)
        assert not is_at_once or self.reports == before + 1, message

    def _peer(self) -> None:
        kind = self.make.rng.choice(kinds_of(peer.Message))
        frame = self.make.frame(kind, node=self.make.rng.choice((*NAMES, "d", "")))
        message = PEER_MESSAGES.decode(frame)
        if isinstance(message, Refusal):
            self._feed(inputs.Unreadable(self._now_s, "peers", "in:00", message))
        else:
            link = f"in:{self.make.rng.choice(NAMES).encode().hex()}"
            self._feed(inputs.FromPeer(self._now_s, link, message))

    def _greet(self, name: str) -> None:
        """A life of this node says Hello."""
        self._lives += 1
        source = f"{self._lives:032x}"
        mine = self._node.settings
        self._current[name] = source
        known = self.make.known["source"]
        known.append(source)
        del known[:-6]
        layout = fingerprint(mine.spec)
        hello = peer.Hello(source, mine.incarnation, name, layout, 1, b"meta", 2**20, 2**16)
        self._feed(inputs.FromPeer(self._now_s, f"in:{name.encode().hex()}", hello))

    def _come_and_go(self) -> None:
        """A session ends, or another one begins."""
        if len(self._owed) > 4:
            session = self.make.rng.choice(list(self._owed)[1:])
            self._feed(inputs.ClientHungUp(self._now_s, session))
            del self._owed[session]  # its calls die with it
        self._sessions += 1
        self._owed[self._sessions] = {}
        self._feed(inputs.ClientJoined(self._now_s, self._sessions, "hostile", 1))

    # ---- the transfer process ----------------------------------------------------------------

    def _serve(self) -> None:
        self._generation += 1
        self._feed(inputs.TransferReady(self._now_s, self._generation, b"meta", "x", "start"))
        if not self._owed:
            self._come_and_go()

    def _transfer(self) -> None:
        """It reports something, in any order."""
        if self._later:
            at = self.make.rng.randrange(len(self._later))
            self._feed(msgspec.structs.replace(self._later.pop(at), at_s=self._now_s))

    def _feed(self, happened: inputs.Input) -> None:
        self.fed[type(happened).__name__] += 1
        step = self._node.step(happened)
        for effect in step.effects:
            self._perform(effect)
        if any(isinstance(one, effects.RestartTransfer) for one in step.effects):
            self._later.clear()
            self._feed(inputs.TransferGone(self._now_s, "fenced"))
            self._serve()

    def _perform(self, effect: effects.Effect) -> None:
        match effect:
            case effects.AnswerEngine():
                self._hear(effect)
            case effects.AnswerOperator():
                self.reports += 1
            case effects.LoadAgent(incarnation=who, generation=which):
                self._later.append(self._loaded(who, which))
            case effects.DropAgent(incarnation=who, generation=which):
                self._later.append(inputs.AgentDropped(0.0, who, which))
            case effects.Post(post=post, after=after):
                self._later.append(self._posted(post, after))
            case effects.Quiesce(lease=lease):
                self._later.append(inputs.Quiet(0.0, lease))
            case effects.SendToPeer(message=peer.Offer(handoff=handoff)):
                self.make.known["handoff"] = [*self.make.known["handoff"][-30:], handoff]
            case effects.Copy() | effects.KeepEpochs():
                self._later.append(self._done(effect))
            case effects.SendToPeer() | effects.RestartTransfer() | effects.Forget():
                pass  # no peer answers here; ``_feed`` restarts; each post is answered in a moment
            case _:
                raise NotImplementedError(effect)  # who waits for it would wait for ever

    def _loaded(self, who: str, which: int) -> inputs.Input:
        if self.make.rng.random() < 0.1:
            return inputs.AgentFailed(0.0, who, which, "no route")
        return inputs.AgentLoaded(0.0, who, which)

    def _posted(self, post: int, after: bytes) -> inputs.Input:
        if after and self.make.rng.random() < 0.3:
            return inputs.Unposted(0.0, post, "its event failed")
        if self.make.rng.random() < 0.2:
            return inputs.PostFailed(0.0, post, "reset")
        return inputs.PostDone(0.0, post, 4096)

    def _done(self, order: effects.Copy | effects.KeepEpochs) -> inputs.Input:
        fails = self.make.rng.random() < 0.2
        if isinstance(order, effects.KeepEpochs):
            return inputs.EpochsKept(0.0, order.ticket, "no space" if fails else "")
        if fails:
            return inputs.CopyFailed(0.0, order.ticket, COPY_REFUSED)
        return inputs.Copied(0.0, order.ticket, 4096)

    def _hear(self, answer: effects.AnswerEngine) -> None:
        message = answer.message
        match message:
            case client.Leased(lease=lease) | client.Received(lease=lease):
                self.make.known["lease"] = [*self.make.known["lease"][-20:], lease]
            case client.Sending(send=send):
                self.make.known["send"] = [*self.make.known["send"][-20:], send]
            case client.Receiving(receive=receive):
                self.make.known["receive"] = [*self.make.known["receive"][-20:], receive]
        if isinstance(message, client.Push):
            return
        self.answers += 1
        if isinstance(message, client.Failed):
            refusal = message.refusal
            assert refusal.code is not Code.INTERNAL or COPY_REFUSED in refusal.message, refusal
        owed = self._owed.get(answer.session)
        if owed is not None:
            assert message.call in owed, f"answered twice, or nobody asked: {message}"
            del owed[message.call]


def besiege_core(count: int, seed: int, pool: PoolSpec = POOLS["mha"]) -> int:
    """A node with this pool is fed ``count`` hostile inputs; how many answers it gave."""
    siege = CoreSiege(seed, pool)
    siege.storm(count)
    return siege.answers + siege.reports


def besiege_orders(count: int, seed: int) -> int:
    """Both ends of the order socket read ``count`` frames; how many of them they could."""
    make = Maker(seed)
    known = 0
    for union, read in ((Order, order_of), (Report, reports_of)):
        kinds = kinds_of(union)
        for _ in range(count // 2):
            body = make.frame(make.rng.choice(kinds))
            if read is reports_of and make.rng.random() < 0.8:
                body = b"\x91" + body
            length = len(body)
            if make.rng.random() < 0.02:
                length = make.rng.choice((0, 1, 2**28 + 1, 2**32 - 1))
            known += _read_stream(make, read, length.to_bytes(4, "little") + body)
    return known


def _read_stream(make: Maker, read, stream: bytes) -> int:
    frames = Frames()
    cut = make.rng.randrange(len(stream) + 1)
    try:
        return sum(1 for part in (stream[:cut], stream[cut:]) for _ in map(read, frames.feed(part)))
    except BadStream:
        return 0


def besiege_metadata(count: int, seed: int) -> int:
    """Read ``count`` frames of metadata that are damaged or lie; how many could be read."""
    make = Maker(seed)
    make.known = {"version": [VERSION], "name": ["kv", "kv", "n" * 256], "pages": [9, 64]}
    region = RegionNote("kv", 2**40, 2**20, 64, 4096, (PieceRow(0, 4096, 4096),))
    sound = pack(Metadata(VERSION, "n-1", b"\x01" * 300, 2**41, 64, (region,)))
    known = 0
    for number in range(count):
        match number % 4:
            case 0:
                framed = make.damaged(sound)
            case 1:
                framed = _framed(make.plausible(Metadata))
            case 2:
                framed = _framed(make.mutant(Metadata))
            case _:
                framed = make.noise() if number % 8 == 3 else _framed(make.damaged(sound[16:]))
        try:
            unpack(framed)
        except BadMetadata:
            continue
        known += 1
    return known


def _framed(body: bytes) -> bytes:
    """With the length and the checksum that belong to it, however little sense it makes."""
    return pack(msgspec.Raw(body))
