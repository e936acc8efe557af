"""A daemon that can be replaced, and an engine whose blocks have bytes: the real workers copy them.

The KV of a token is a hash of the weights and of all tokens up to it, so whose KV a page or a block
has can be read from its bytes. The daemon checks what is committed, the engine what was loaded, and
another engine of the node fills all pages that it can get with bytes of its own, which nobody else
may change.

Copies take their time: none moves before its mark has come and the daemon knows of it, and each
goes page by page, in any order, while the engine goes on.

A daemon is replaced by one with other memory, in which the same page numbers are free again, or by
one with the same, which keeps the leases of before for who holds them.
"""

from __future__ import annotations

import functools
import random
import zlib
from types import SimpleNamespace

import numpy as np

from kvd.client import Code, KvdError, LeaseKey, LeaseTiers, Matched
from kvd.client.mover.pending_copy import CopyState
from kvd.client.mover.pieces import NO_BLOCK
from kvd.connectors.identity import UnknownWeights
from kvd.connectors.vllm.layout import LayerGroup
from kvd.connectors.vllm.media import NO_TOKENS
from kvd.connectors.vllm.options import VllmOptions
from kvd.connectors.vllm.scheduler import SchedulerHalf
from kvd.connectors.vllm.worker import WorkerHalf
from kvd.errors import Refusal
from tests.connectors.vllm.stand_ins import CountedBlocks

BLOCK = 4
LAYERS = 2
PAGES = 48
BLOCKS = 400
FOREIGN = 0x55
SLOT = 4
"""Bytes of the KV of one token, in one layer."""


def refusal(code: Code, why: str = "no") -> KvdError:
    return KvdError(Refusal(code, why))


def kv_of(tokens, layer, weights) -> bytes:
    """Of the last of them."""
    return _kv_of(tuple(tokens), layer, weights)


@functools.lru_cache(maxsize=1 << 16)
def _kv_of(tokens, layer, weights) -> bytes:
    return zlib.crc32(repr((layer, weights, tokens)).encode()).to_bytes(SLOT, "little")


def kv_rows(tokens, first, layer, weights):
    """The bytes of tokens ``first`` to the last, one after the other."""
    return b"".join(kv_of(tokens[: n + 1], layer, weights) for n in range(first, len(tokens)))


class WorldCall:
    """A call that is answered when the daemon reads it.

    ``ends``: a lease whose end it is, also where the daemon ends before that.
    """

    def __init__(self, node, make, undo=None, ends=None):
        self.node, self.make, self.undo, self.ends = node, make, undo, ends
        self.value = self.error = None
        self.is_done = False
        node.pending.append(self)
        node.serve()

    def come(self):
        if self.is_done:
            return
        self.is_done = True
        try:
            self.value = self.make()
        except KvdError as error:
            self.error = error
        self.node.ended.append(self)

    def fail(self, error):
        if not self.is_done:
            self.is_done, self.error = True, error
            self.node.ended.append(self)
            if self.ends is not None:
                self.node.world.drop(self.ends)

    def poll(self):
        self.node.serve()
        if self.error is not None:
            raise self.error
        return self.value

    def cancel(self):
        if self.is_done and self.value is not None and self.undo is not None:
            self.undo(self.value)
        self.is_done = True


class WorldLease:
    tiers = LeaseTiers()

    def __init__(self, node, tokens, pages, prefix_len, namespace):
        world = node.world
        world.last += 1
        self.node, self.id, self.life = node, world.last, world.life
        self.tokens, self.prefix_len, self.namespace = list(tokens), prefix_len, namespace
        self.row = pages
        self.copies, self.is_ended = 0, False
        self.send = None
        self.epoch, self.weights = world.epoch, world.weights
        world.leases[self.id] = self

    @property
    def pages(self):
        return np.array(self.row, dtype=np.int32)

    @property
    def key(self):
        return LeaseKey(
            session=self.node.session, incarnation=self.node.incarnation, lease=self.id, version=1
        )

    def _check(self):
        self.node.alive()
        if self.life != self.node.world.life:
            raise refusal(Code.BEFORE_RESTART)
        if self.id not in self.node.world.leases:
            raise refusal(Code.UNKNOWN_LEASE)

    def _share(self, new_tokens, upto_tokens):
        tokens = self.tokens + list(new_tokens)
        if not 0 <= upto_tokens <= len(tokens) or upto_tokens > len(self.row) * BLOCK:
            raise refusal(Code.BAD_REQUEST)
        self.tokens = tokens
        self.node.world.share(self, upto_tokens)

    def begin_commit(self, new_tokens=(), upto_tokens=None, *, swap=True):
        def commit():
            self._check()
            self._share(new_tokens, upto_tokens)
            return self

        return WorldCall(self.node, commit)

    def begin_extend(self, n_tokens):
        def extend():
            self._check()
            self.row = self.row + self.node.world.take(-(-n_tokens // BLOCK))
            return self

        return WorldCall(self.node, extend)

    def begin_release(self, new_tokens=None, upto_tokens=None):
        def release():
            world = self.node.world
            if self.life == world.life:
                self._check()
                if new_tokens is not None:
                    self._share(new_tokens, upto_tokens)
                if self.send is not None:
                    self.send.lease_ends(upto_tokens or 0)
            world.drop(self)
            return self

        return WorldCall(self.node, release, ends=self)

    def share(self, new_tokens=(), upto_tokens=None):
        self.begin_commit(new_tokens, upto_tokens, swap=False)

    def leave(self, new_tokens=None, upto_tokens=None):
        def release():
            try:
                self.begin_release(new_tokens, upto_tokens).poll()
            except KvdError:
                self.node.world.drop(self)

        WorldCall(self.node, release, ends=self)


class WorldSend:
    """A room that is open while its prompt is computed, and finished when all of it is saved."""

    def __init__(self, lease, room):
        lease._check()
        self.lease, self.room, self.n_tokens = lease, room, len(lease.tokens)
        self.outcome = None
        lease.send = self

    def begin_abort(self, reason):
        def abort():
            self.outcome = self.outcome or reason
            return self

        return WorldCall(self.lease.node, abort)

    def lease_ends(self, upto_tokens):
        world, lease = self.lease.node.world, self.lease
        if self.outcome is not None:
            return
        if upto_tokens < self.n_tokens:
            world.wrong.append(f"room {self.room} stays open, and nobody writes its prompt")
            return
        world.check(lease.row, lease.tokens[: self.n_tokens], lease.weights)
        world.handed.append(self.room)


class WorldReceive:
    arriving = None

    def __init__(self, node, room, tokens, namespace):
        self.node, self.room, self.tokens, self.namespace = node, room, tokens, namespace
        self.prefix_len, self.n_tokens = 0, len(tokens)
        world = node.world
        self.lease = WorldLease(node, tokens, world.take(len(tokens) // BLOCK + 3), 0, namespace)
        self.is_delivered = False

    def begin_done(self):
        def done():
            world = self.node.world
            if self.room not in world.rooms:
                raise refusal(Code.ABORTED)
            world.fill(self.lease.row, self.tokens, self.lease.weights)
            self.is_delivered = True
            return self.lease

        return WorldCall(self.node, done)

    def begin_cancel(self):
        def cancel():
            if self.is_delivered:
                raise refusal(Code.WRONG_STATE)
            self.node.world.drop(self.lease)
            return self

        return WorldCall(self.node, cancel)


class WorldNode:
    def __init__(self, world):
        self.world, self.name = world, "n0"
        self.session = len(world.nodes) + 1
        self.token = f"token {self.session}".encode()
        self.in_life = world.life
        self.pending, self.ended, self.workers = [], [], []
        self.is_closed = False
        self.end = None
        world.nodes.append(self)

    @property
    def incarnation(self):
        return f"life {self.in_life}"

    @property
    def life(self):
        return self.session, self.incarnation

    @property
    def is_away(self):
        return self.end is None and self.in_life != self.world.life

    def gather(self):
        """Each call is said at once here."""

    def send_gathered(self):
        pass

    def alive(self):
        if self.is_closed:
            raise ValueError("I/O operation on closed epoll object")
        if self.end is not None:
            raise self.end
        if self.is_away or self.world.is_down:
            raise refusal(Code.UNREACHABLE)

    def serve(self):
        if self.is_closed or self.world.is_hung:
            return
        if self.world.holds and not self.world.is_down:
            return
        pending, self.pending = self.pending, []
        for call in pending:
            call.come()

    def pump(self):
        if self.is_closed:
            raise ValueError("I/O operation on closed epoll object")
        if self.in_life != self.world.life and not self.world.is_down:
            if self.world.memory is self.world.memory_of[self.in_life]:
                self.in_life = self.world.life
            else:
                self.end = refusal(Code.POOL_CHANGED, "other memory")
        self.serve()
        ended, self.ended = self.ended, []
        return ended

    def close(self):
        self.is_closed = True
        self.world.left(self)

    def prompt(self, tokens, *, extra_keys=None):
        self.alive()
        return SimpleNamespace(tokens=list(tokens), extra=extra_keys)

    def begin_match(self, prompt, *, namespace=""):
        self.alive()
        tokens = getattr(prompt, "tokens", prompt)

        def match():
            self.alive()
            found = len(self.world.found(tokens, namespace)) * BLOCK
            more = len(self.world.in_tier(tokens, namespace)) * BLOCK
            return Matched(found, load=0, free=0, tier_tokens=more)

        return WorldCall(self, match)

    def begin_lease(self, prompt, *, hold, namespace, deadline_s, **more):
        self.alive()
        tokens = list(getattr(prompt, "tokens", prompt))
        waits = deadline_s > 0
        assert not waits or self.world.has_tier, "a scheduler never waits for room"

        def lease():
            self.alive()
            lying, n_read = len(self.world.in_tier(tokens, namespace)), 0
            if waits:
                n_read = self.world.promote(tokens, namespace)
            found = self.world.found(tokens, namespace)
            n_pages = -(-len(tokens) // BLOCK)
            more = [] if hold == "prefix" else self.world.take(n_pages - len(found), keep=found)
            known = tokens if hold == "all" else tokens[: len(found) * BLOCK]
            made = WorldLease(self, known, found + more, len(found) * BLOCK, namespace)
            made.tiers = LeaseTiers(n_read * BLOCK, 0 if waits else lying * BLOCK)
            return made

        return WorldCall(self, lease, lambda one: one.begin_release())

    def begin_receive(self, room, prompt, source, *, namespace, **how):
        self.alive()
        return WorldCall(
            self,
            lambda: self.world.receive_of(self, room, prompt.tokens, namespace, **how),
            lambda one: one.begin_cancel(),
        )

    def begin_send(self, room, *, lease, when_written, **how):
        assert when_written

        def send():
            if self.world.refuses_rooms or not self.world.opens_rooms:
                raise refusal(Code.DRAINING)
            return WorldSend(lease, room)

        return WorldCall(self, send, lambda one: one.begin_abort("undone"))

    def begin_hand_over(self, room, *, lease, release, **how):
        def hand_over():
            lease._check()
            if self.world.refuses_rooms:
                raise refusal(Code.DRAINING)
            self.world.check(lease.row, lease.tokens, lease.weights)
            self.world.handed.append(room)
            self.world.drop(lease)
            return room

        assert release
        return WorldCall(self, hand_over, ends=lease)

    def begin_new_epoch(self, namespace):
        self.alive()

        def begin():
            self.alive()
            if self.world.refuses_epochs:
                raise refusal(Code.ABORTED)
            self.world.epoch += 1
            return self.world.epoch

        return WorldCall(self, begin)


class Stream:
    """What an engine has its device do, in order, and when it likes."""

    def __init__(self):
        self.works = []
        self.begun = self.done = 0

    def begin(self, work):
        self.begun += 1
        self.works.append(work)

    def run(self):
        works, self.works = self.works, []
        for work in works:
            work()
            self.done += 1


class WorldCopy:
    """A copy under way: it goes on by ``turn``."""

    def __init__(self, blocks, key, pairs, *, is_load, first_page, upto_tokens, after):
        self.blocks, self.key, self.pairs = blocks, key, pairs
        self.worker, self.world = blocks.worker, blocks.worker.world
        self.memory, self.life = self.worker.memory, self.worker.life
        self.is_load, self.first_page, self.upto_tokens = is_load, first_page, upto_tokens
        self.after, self.lease = after, None
        self.left = list(pairs)
        self.is_over = self.is_cancelled = False
        self.refusal = None
        self.n_bytes, self.waited_s, self.moved_s = 0, 0.0, 0.0

    @property
    def state(self):
        if self.is_over or self.lease is not None:
            if self.is_over:
                return CopyState.OVER
            return CopyState.MOVING if self.left and not self.is_cancelled else CopyState.ENDING
        return CopyState.ASKING if self.has_come else CopyState.WAITING

    @property
    def has_come(self):
        return self.after is None or self.after <= self.blocks.stream.done

    @property
    def is_moving(self):
        return self.lease is not None and not self.is_over

    def safe(self):
        """Who asks for it in vain waits for it, and does nothing else."""
        if self.state not in {CopyState.OVER, CopyState.ENDING}:
            self.blocks.stream.run()
            self.turn()
        return self.state in {CopyState.OVER, CopyState.ENDING}

    def result(self, within_s):
        """Time passes by steps here."""
        raise refusal(Code.DEADLINE)

    def cancel(self):
        self.is_cancelled = True
        if self.state is CopyState.ASKING:
            self._end(refusal(Code.CANCELLED))

    def turn(self):
        if self.is_over:
            return
        if self.lease is None:
            self._ask()
        elif self.left and not self.is_cancelled:
            page, column = self.left.pop(self.world.rng.randrange(len(self.left)))
            for memory, layer, block in zip(self.memory, self.blocks.layers, column, strict=True):
                if block == NO_BLOCK:
                    continue
                if self.is_load:
                    layer.array[block] = memory[page]
                else:
                    memory[page] = layer.array[block]
            if not self.left:
                self.n_bytes = len(self.pairs) * LAYERS * BLOCK * SLOT
                if self.is_load and self.life == self.world.life and not self.world.is_down:
                    self._end(None)
        elif not self.world.is_hung or self.world.is_down:
            is_lost = self.left or self.life != self.world.life or self.world.is_down
            self._end(refusal(Code.CANCELLED) if is_lost else None)

    def _ask(self):
        world = self.world
        if self.is_cancelled:
            self._end(refusal(Code.CANCELLED))
        elif self.has_come:
            if world.is_down or self.life != world.life:
                self._end(refusal(Code.UNREACHABLE))
            elif not world.is_hung:
                lease = world.leases.get(self.key.lease)
                row = [] if lease is None else lease.row
                upto = self.first_page + len(self.pairs)
                if lease is None or lease.is_ended:
                    self._end(refusal(Code.UNKNOWN_LEASE))
                elif row[self.first_page : upto] != [page for page, _ in self.pairs]:
                    world.wrong.append(f"pages of lease {lease.id} that it has not")
                    self._end(refusal(Code.BAD_PAGES))
                else:
                    self._check_alone(lease)
                    self.lease = lease
                    lease.copies += 1

    def _check_alone(self, lease):
        pages = {page for page, _ in self.pairs}
        for other in self.world.copies:
            meets = other.lease is lease and pages & {page for page, _ in other.pairs}
            if meets and not other.is_over and not (self.is_load and other.is_load):
                self.world.wrong.append(f"two copies of pages {meets} at once")

    def _end(self, error):
        self.is_over, self.refusal = True, None if error is None else error.refusal
        self.world.copies.remove(self)
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.copies -= 1
            if lease.is_ended and not lease.copies:
                self.world.drop(lease)


class WorldBlocks:
    """The blocks of an engine, and the orders to copy them."""

    def __init__(self, worker, layers):
        self.worker = worker
        self.is_grouped = isinstance(layers, list)
        groups = layers if self.is_grouped else [layers]
        self.layers = [layer for group in groups for layer in group.values()]
        self.stream = self.layers[0].stream
        self.is_closed = False

    def mark(self):
        return self.stream.begun

    def begin_save(self, key, blocks, *, pages, first_page, upto_tokens, after):
        return self._begin(key, blocks, pages, first_page, upto_tokens, after, is_load=False)

    def begin_load(self, key, blocks, *, pages, first_page, after):
        return self._begin(key, blocks, pages, first_page, 0, after, is_load=True)

    def _begin(self, key, blocks, pages, first_page, upto_tokens, after, *, is_load):
        if self.is_closed or not self.worker.owns(key):
            raise refusal(Code.UNKNOWN_SESSION)
        rows = blocks["kv"] if self.is_grouped else [blocks["kv"]] * LAYERS
        copy = WorldCopy(
            self,
            key,
            list(zip(pages["kv"], zip(*rows, strict=True), strict=True)),
            is_load=is_load,
            first_page=first_page,
            upto_tokens=upto_tokens,
            after=after,
        )
        self.worker.world.copies.append(copy)
        return copy

    def close(self):
        self.is_closed = True
        for copy in [copy for copy in self.worker.world.copies if copy.blocks is self]:
            copy.cancel()
            self.stream.run()
            for _ in range(len(copy.pairs) + 3):
                copy.turn()
            # A daemon that does not answer is waited for by nobody who leaves.
            if not copy.is_over:
                copy._end(refusal(Code.CANCELLED))


class WorldWorker:
    """One rank's part in a session."""

    def __init__(self, world, node):
        self.world, self.node, self.memory = world, node, world.memory
        self.life, self.session = world.life, node.session
        self.is_closed = False
        self._end = None

    @property
    def incarnation(self):
        return f"life {self.life}"

    def owns(self, key):
        self.notice()
        is_ours = (key.session, key.incarnation) == (self.session, self.incarnation)
        return self._end is None and is_ours

    def notice(self):
        world = self.world
        is_quiet = not any(copy.worker is self and copy.is_moving for copy in world.copies)
        is_back = not world.is_down and not world.are_workers_late
        if self.life != world.life and is_back and is_quiet:
            if self.memory is world.memory:
                self.life = world.life
            else:
                self._end = Refusal(Code.POOL_CHANGED, "other memory")

    def pool(self, name):
        tensors = [SimpleNamespace(layer=n, page_shape=(BLOCK * SLOT,)) for n in range(LAYERS)]
        return SimpleNamespace(
            name=name,
            page_size=BLOCK,
            shards=(),
            memory=SimpleNamespace(
                family="raw", components=[SimpleNamespace(name="kv", tensors=tensors)]
            ),
            arrays=lambda part, *, layer, shard: {"raw": self.memory[layer]},
        )

    def blocks(self, layers, *, block_size, pool, threads):
        assert (block_size, pool, threads) == (BLOCK, "main", 1)
        return WorldBlocks(self, layers)

    def close(self):
        self.is_closed = True
        self.node.workers.remove(self)
        self.world.left(self.node)


class Adapter:
    """What a request's adapter is known by, once somebody has asked for it so often."""

    number = 1
    weights = None

    def __init__(self, after=0):
        self.after = after
        self.is_unknown = False

    def poll(self):
        if self.is_unknown:
            raise UnknownWeights("it was replaced")
        self.after -= 1
        return None if self.after >= 0 else "ad-1"


class World:
    """The daemon of a node, in one life after the other."""

    def __init__(self, *, has_states=False, has_tier=False):
        """``has_states``: the last layer has one for a page, that of all tokens up to its last.
        ``has_tier``: what is evicted lies below the pool, and outlives the daemon.
        """
        self.has_states, self.has_tier = has_states, has_tier
        self.tier, self.n_promoted = {}, 0
        self.life, self.last = 1, 0
        self.nodes, self.foreign, self.handed = [], [], []
        self.rooms = set()
        self.copies, self.rng = [], random.Random(0)
        """Those that are under way, and in which order they go on."""
        self.wrong = []
        """What was to be shared, or handed over, and is no KV of its tokens."""
        self.is_hung = self.is_down = self.holds = False
        self.are_workers_late = self.refuses_rooms = self.refuses_epochs = False
        self.opens_rooms = True
        self.epoch = self.weights = 0
        """What is cached is of an epoch; ``weights``: those that its engine has now."""
        self.memory_of = {}
        self._fresh()

    def _fresh(self):
        self.memory = [np.zeros((PAGES, BLOCK * SLOT), np.uint8) for _ in range(LAYERS)]
        self.memory_of[self.life] = self.memory
        self.cached, self.leases, self.foreign = {}, {}, []

    # ---- its ends ----

    def kill(self):
        self.is_down = True
        self.life += 1
        self.memory_of[self.life] = None
        for node in self.nodes:
            for call in node.pending:
                call.fail(refusal(Code.UNREACHABLE))
            node.pending.clear()

    def start(self, *, same_memory):
        self.is_down = False
        if same_memory:
            self.memory_of[self.life] = self.memory
        else:
            self._fresh()

    def take_all(self):
        """Another engine has every page that is free, and writes its KV there."""
        self.foreign = self.take(len(self._free()))
        for layer in self.memory:
            layer[self.foreign] = FOREIGN

    def give_back(self):
        self.foreign = []

    def check_foreign(self):
        for layer in self.memory:
            wrong = [one for one in self.foreign if (layer[one] != FOREIGN).any()]
            assert not wrong, f"pages {wrong} of another engine were written"

    # ---- pages ----

    def _free(self):
        held = set(self.foreign)
        held.update(page for lease in self.leases.values() for page in lease.row)
        return [page for page in range(1, PAGES) if page not in held]

    def take(self, n, keep=()):
        free = [page for page in self._free() if page not in keep]
        if len(free) < n:
            raise refusal(Code.DEADLINE)
        cached = set(self.cached.values())
        free.sort(key=lambda page: page in cached)
        taken = free[: max(0, n)]
        for key, page in list(self.cached.items()):
            if page in taken:
                if self.has_tier:
                    self.tier[key] = [layer[page].copy() for layer in self.memory]
                del self.cached[key]
        return taken

    def in_tier(self, tokens, namespace):
        """The keys of pages that lie there, behind those that are cached."""
        first, keys = len(self.found(tokens, namespace)) + 1, []
        for n in range(first, len(tokens) // BLOCK + 1):
            key = (self.epoch, namespace, *tokens[: n * BLOCK])
            if key not in self.tier:
                break
            keys.append(key)
        return keys

    def promote(self, tokens, namespace):
        """How many of these are cached again: as many as there is room for."""
        keys, n_before = self.in_tier(tokens, namespace), self.n_promoted
        for key in keys:
            try:
                (page,) = self.take(1, keep=self.found(tokens, namespace))
            except KvdError:
                break
            for layer, kv in zip(self.memory, self.tier[key], strict=True):
                layer[page] = kv
            self.cached[key] = page
            self.n_promoted += 1
        return self.n_promoted - n_before

    def drop(self, lease):
        """It goes once no copy to its pages, or from them, is under way."""
        lease.is_ended = True
        if not lease.copies:
            self.leases.pop(lease.id, None)

    def turn(self):
        """Each copy that is under way goes on a little."""
        for copy in list(self.copies):
            copy.turn()

    def finish_copies(self):
        """All of them are made, but what has to wait for the daemon, or for a mark."""
        for _ in range(PAGES + 4):
            self.turn()

    def left(self, node):
        if node.is_closed and not node.workers:
            for lease in [one for one in self.leases.values() if one.node is node]:
                self.drop(lease)

    def found(self, tokens, namespace):
        pages = []
        while len(tokens) >= (len(pages) + 1) * BLOCK:
            key = (self.epoch, namespace, *tokens[: (len(pages) + 1) * BLOCK])
            if key not in self.cached:
                break
            pages.append(self.cached[key])
        return pages

    def is_state(self, layer):
        return self.has_states and layer == LAYERS - 1

    def slot(self, layer, n):
        """Where the KV of a token begins in its block: a state takes the place of that before."""
        return 0 if self.is_state(layer) else n % BLOCK * SLOT

    def page_of(self, tokens, n, layer, weights):
        """What a page has, of tokens from ``n`` to the last of these."""
        first = len(tokens) - 1 if self.is_state(layer) else n
        return kv_rows(tokens, first, layer, weights)

    def fill(self, pages, tokens, weights):
        for n in range(0, len(tokens), BLOCK):
            for layer, memory in enumerate(self.memory):
                if self.is_nobodys(layer, n, tokens):
                    memory[pages[n // BLOCK]] = FOREIGN
                    continue
                kv = self.page_of(tokens[: n + BLOCK], n, layer, weights)
                memory[pages[n // BLOCK], : len(kv)] = np.frombuffer(kv, np.uint8)

    def is_nobodys(self, layer, n, tokens):
        """Whether nobody may go on from what the page at ``n`` has of that layer.

        The last page of a sent prompt may be saved when its request has gone on: a state is of
        more tokens by then. Who decodes loads whole pages of such layers, and computes the rest.
        """
        return self.is_state(layer) and n + BLOCK > len(tokens)

    def check(self, pages, tokens, weights):
        """The KV of these tokens, and no other, is in these pages."""
        for n in range(0, len(tokens), BLOCK):
            for layer, memory in enumerate(self.memory):
                if self.is_nobodys(layer, n, tokens):
                    continue
                kv = self.page_of(tokens[: n + BLOCK], n, layer, weights)
                if memory[pages[n // BLOCK]].tobytes()[: len(kv)] != kv:
                    # Whoever calls the daemon is a connector, out of which no exception comes.
                    why = f"page {pages[n // BLOCK]} has other KV than that of its tokens"
                    self.wrong.append(why)
                    raise AssertionError(why)

    def share(self, lease, upto_tokens):
        whole = upto_tokens // BLOCK * BLOCK
        self.check(lease.row, lease.tokens[:whole], lease.weights)
        for n in range(whole // BLOCK):
            key = (lease.epoch, lease.namespace, *lease.tokens[: (n + 1) * BLOCK])
            self.cached.setdefault(key, lease.row[n])

    # ---- who comes ----

    def connect(self):
        if self.is_down or self.is_hung:
            raise refusal(Code.UNREACHABLE)
        return WorldNode(self)

    def receive_of(self, node, room, tokens, namespace, **how):
        """A daemon that tells nothing before all of it has come."""
        return WorldReceive(node, room, tokens, namespace)

    def go_on(self, *, is_last=False):
        """What other nodes send goes on; ``is_last``: to its end."""

    def join(self, token):
        for node in self.nodes:
            if node.token == token and not self.is_down and not self.is_hung:
                if node.is_closed and not node.workers:
                    break
                worker = WorldWorker(self, node)
                node.workers.append(worker)
                return worker
        raise refusal(Code.UNKNOWN_SESSION)


class Layer:
    """As a tensor: blocks, and the bytes of each. ``stream`` is what writes them."""

    def __init__(self, stream=None):
        self.stream = stream or Stream()
        self.array = np.zeros((BLOCKS, BLOCK * SLOT), np.uint8)
        self.shape = self.array.shape

    def stride(self):
        return self.array.strides

    def element_size(self):
        return 1

    def data_ptr(self):
        return self.array.ctypes.data


class WorldEngine:
    """vLLM's scheduler and one worker of it, a step at a time; blocks are given to others at once.

    ``is_slow``: what is ordered is done some steps later, in order, as with steps that overlap.
    ``are_threads_slow``: what is done in threads, such as joining a session, takes a step.
    ``are_copies_slow``: a copy goes on by a page a step. ``can_be_held`` false: blocks cannot be.
    ``window``: each layer is a group, and the last one attends to so many tokens: blocks before
    these are given to others while the request goes on. Where the world has states, the last layer
    has one in the place of a window, and each step ends at the end of a block at the latest.
    ``local``: by request, how many tokens vLLM has in its own cache. ``is_busy``: what is loaded
    has no turn, as where others are running.
    """

    def __init__(self, world, chunk=8, *, can_be_held=True, window=0, **options):
        # A state is read by the next token alone.
        self.world, self.chunk, self.window = world, chunk, 2 if world.has_states else window
        self.local, self.filled = {}, []
        self.clock_s = 0.0
        self.are_threads_slow = self.are_copies_slow = False
        self.beside = []
        self.requests, self.blocks = {}, {}
        groups = [
            LayerGroup(
                *((f"layer {n}",), BLOCK), is_windowed=n == LAYERS - 1, has_states=world.is_state(n)
            )
            for n in range(LAYERS)
        ]
        groups = groups if self.window else []
        self.counted = CountedBlocks(self.blocks, can_be_held=can_be_held, groups=groups)
        self.half = SchedulerHalf(
            VllmOptions(probe_wait_s=0.0, **options),
            base_namespace="model",
            block_size=BLOCK,
            connect=world.connect,
            blocks=self.counted,
            now_s=lambda: self.clock_s,
            start=self._start,
        )
        self.half.look_every_s = 0.0
        self.looks = None
        """Whoever draws when the session is looked at beside the steps, between two hooks."""
        self.stream = Stream()
        self.layers = {f"layer {n}": Layer(self.stream) for n in range(LAYERS)}
        self.worker = WorkerHalf(
            VllmOptions(endpoint="ipc:///nowhere/kvd/client.sock"),
            block_size=BLOCK,
            open_session=world.join,
            now_s=lambda: self.clock_s,
            start=self._start,
        )
        self.worker.register(self.layers, groups)
        self.waiting, self.running, self.remote, self.loaded = [], [], {}, []
        self.held, self.over, self.preempted = set(), set(), set()
        self.queue = []
        self.is_slow = self.has_no_blocks = self.computes_all = self.is_busy = False
        self.loaded_tokens = 0

    def add(self, request, extra=(), lora=None):
        """``extra`` None: it cannot be found."""
        self.requests[request.request_id] = request
        self.half.arrived(request, lora=lora, extra=NO_TOKENS if extra is None else dict(extra))
        self.waiting.append(request)
        return request

    def _look_beside(self):
        if self.looks is not None and self.looks.random() < 0.2:
            self.half.kept_in("a look beside the steps", None, self.half._look)

    def _start(self, work):
        if self.are_threads_slow:
            self.beside.append(work)
        else:
            work()

    def step(self):
        self.clock_s += 0.01
        beside, self.beside = self.beside, []
        for work in beside:
            work()
        for request in list(self.loaded):
            self._go_on(request)
        for request in self.running:
            self._take_back(request)
        for request in list(self.waiting):
            self._schedule(request)
        scheduled = {}
        for request in self.running:
            left = request.num_tokens - request.num_computed_tokens
            most = BLOCK - request.num_computed_tokens % BLOCK if self.world.has_states else left
            scheduled[request.request_id] = min(left, self.chunk, most)
        behind = {one: self.requests[one].num_computed_tokens + n for one, n in scheduled.items()}
        preempted, self.preempted = self.preempted, set()
        self._look_beside()
        orders = self.half.step(scheduled, preempted)
        filled, self.filled = self.filled, []
        written = filled + [
            (
                [list(row) for row in self._rows(one)],
                list(self.requests[one].all_token_ids[:upto]),
                upto - scheduled[one],
                self.world.weights,
            )
            for one, upto in behind.items()
        ]
        for one, upto in behind.items():
            self.requests[one].num_computed_tokens = upto
        self.queue.append((orders, written))
        while self.queue and not self.is_slow:
            self._work(*self.queue.pop(0))

    def steps(self, n):
        for _ in range(n):
            self.step()

    def _rows(self, one):
        """By layer."""
        return self.blocks[one] if self.window else [self.blocks[one]] * LAYERS

    def _first_needed(self, layer, upto):
        """What is computed behind so many tokens reads none before this one."""
        return max(0, upto - self.window + 1) if self.window and layer == LAYERS - 1 else 0

    def _take_back(self, request):
        """What lies beyond a window is another one's from now on."""
        for layer, row in enumerate(self._rows(request.request_id)):
            skipped = self._first_needed(layer, request.num_computed_tokens) // BLOCK
            row[:skipped] = [CountedBlocks.null_block] * skipped

    def _schedule(self, request):
        most = (request.num_tokens - 1) // BLOCK * BLOCK
        local = min(self.local.get(request.request_id, 0), most)
        n_tokens, is_async = self.half.matched(request, local)
        # Asked, and not heard, where all of a prompt is computed, as for its logprobs.
        if (n_tokens is None and not self.computes_all) or self.has_no_blocks:
            return
        n_tokens = n_tokens or 0
        assert is_async == bool(n_tokens)
        assert n_tokens < request.num_tokens, "nothing is left to compute"
        if self.computes_all:
            n_tokens = local = 0
        upto = local + n_tokens
        self._give(request, request.num_tokens // BLOCK + 12, upto)
        self._fill(request, local)
        self._look_beside()
        self.half.given_blocks(request, n_tokens)
        self.waiting.remove(request)
        if n_tokens:
            self.remote[request.request_id] = upto
            self.counted.unused.add(request.request_id)
        else:
            request.num_computed_tokens = upto
            self.running.append(request)

    def _give(self, request, n_blocks, upto):
        used = {block for one in self.blocks for row in self._rows(one) for block in row}
        used |= self.counted.needed.keys()
        free = [block for block in range(1, BLOCKS) if block not in used]
        n_rows = LAYERS if self.window else 1
        assert len(free) >= n_blocks * n_rows, "blocks are lost"
        rows = [free[n * n_blocks : (n + 1) * n_blocks] for n in range(n_rows)]
        self.blocks[request.request_id] = rows if self.window else rows[0]
        for layer, row in enumerate(rows):
            skipped = self._first_needed(layer, upto) // BLOCK
            row[:skipped] = [CountedBlocks.null_block] * skipped

    def _fill(self, request, upto):
        """What vLLM has in its own cache: of a layer with a window the last blocks alone."""
        rows = [list(row) for row in self._rows(request.request_id)]
        tokens = list(request.all_token_ids[:upto])
        if upto:
            self.filled.append((rows, tokens, 0, self.world.weights))

    def _work(self, orders, written):
        self.worker.give_back(orders)
        for step in written:
            self.stream.begin(lambda step=step: self._compute(*step))
        self.worker.load(orders)
        self.worker.save(orders)
        # Whatever may move now does so before anything is computed.
        self.world.turn()
        self.world.turn()
        self.stream.run()
        if self.are_copies_slow:
            self.world.turn()
        else:
            self.world.finish_copies()
        loaded, failed = self.worker.take_results()
        for one in self.worker.take_freed():
            self.held.remove(one)
            del self.blocks[one]
        report = self.worker.take_report()
        self.heard(report)
        self._look_beside()
        self.half.reported(report)
        for one in loaded:
            upto = self.remote.pop(one)
            request = self.requests[one]
            if one in self.over:
                del self.blocks[one]
                self.counted.used(one)
            elif one in failed:
                self._begin_anew(request)
            else:
                request.num_computed_tokens = upto
                self.loaded.append(request)
                self._go_on(request)

    def _go_on(self, request):
        """It is loaded: in a step, unless it is to begin anew, or others are."""
        one = request.request_id
        if one in self.counted.taken:
            self.loaded.remove(request)
            self._begin_anew(request)
        elif not self.is_busy:
            self.loaded.remove(request)
            self.counted.used(one)
            self._check_loaded(request, request.num_computed_tokens)
            self.half.given_blocks(request, 0)
            self.running.append(request)

    def _begin_anew(self, request):
        one = request.request_id
        del self.blocks[one]
        self.counted.used(one)
        request.num_computed_tokens = 0
        self.waiting.append(request)

    def heard(self, report):
        """What else there is to be heard of it."""

    def _compute(self, rows, tokens, first, weights):
        """What is computed reads the KV of all tokens before it, and writes its own."""
        known = range(weights + 1)
        for layer, one in enumerate(self.layers.values()):
            for n in range(self._first_needed(layer, first), first):
                at = self.world.slot(layer, n)
                found = one.array[rows[layer][n // BLOCK], at : at + SLOT].tobytes()
                assert any(found == kv_of(tokens[: n + 1], layer, w) for w in known), (
                    f"token {n} of {len(tokens)} is read from a block that is another one's"
                )
            for n in range(first, len(tokens)):
                at, block = self.world.slot(layer, n), rows[layer][n // BLOCK]
                if block != CountedBlocks.null_block:
                    kv = np.frombuffer(kv_of(tokens[: n + 1], layer, weights), np.uint8)
                    one.array[block, at : at + SLOT] = kv

    def _check_loaded(self, request, upto):
        self.loaded_tokens += upto
        tokens, rows = list(request.all_token_ids[:upto]), self._rows(request.request_id)
        for layer, one in enumerate(self.layers.values()):
            for n in range(self._first_needed(layer, upto), upto):
                at = self.world.slot(layer, n)
                found = one.array[rows[layer][n // BLOCK], at : at + SLOT]
                assert found.tobytes() == kv_of(tokens[: n + 1], layer, self.world.weights), (
                    f"token {n} of {request.request_id} is computed from KV that is not its own"
                )

    def update_weights(self):
        """New weights, and a reset of the caches; running requests go on, as vLLM lets them."""
        self.world.weights += 1
        return self.half.flush()

    def preempt(self, request):
        self.running.remove(request)
        del self.blocks[request.request_id]
        self.preempted.add(request.request_id)
        request.num_computed_tokens = 0
        self.waiting.append(request)

    def finish(self, request):
        one = request.request_id
        for queue in (self.waiting, self.running, self.loaded):
            if request in queue:
                queue.remove(request)
        self.over.add(one)
        is_held, told = self.half.finished(request)
        if is_held:
            self.held.add(one)
        elif one not in self.remote:
            self.blocks.pop(one, None)
            self.counted.used(one)
        return told

    def settle(self):
        """The daemon is well, and nothing is under way any more: nothing may be left anywhere."""
        world = self.world
        world.go_on(is_last=True)
        world.holds = world.is_hung = world.are_workers_late = self.is_slow = False
        world.refuses_epochs = False
        self.has_no_blocks = self.are_threads_slow = self.are_copies_slow = False
        self.is_busy = False
        for _ in range(12):
            self.clock_s += 2.0
            self.step()
        for request in [*self.waiting, *self.running]:
            self.finish(request)
        for _ in range(12):
            self.clock_s += 2.0
            self.step()
        world.check_foreign()
        assert not world.wrong
        for half in (self.half, self.worker):
            assert not half._log._bugs_until_s, "a mistake of the connector's, kept in"
        assert not self.remote, "blocks wait for ever"
        assert not self.held, "blocks are held for ever"
        assert not self.blocks, "blocks are lost"
        assert not self.counted.needed, "blocks are held by reference for ever"
        assert not world.copies, "a copy is under way for ever"
        assert not self.half.has_work
        assert not world.leases, "a lease is kept"
