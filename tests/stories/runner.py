"""Plays a story: commands, a line ``----``, and everything that happened until the next command.

A story is one file ``*.txt``; lines that begin with ``#`` are prose. The commands are the methods
of ``Story`` that begin with ``do_``, their arguments are words. ``KVD_REWRITE=1`` writes what
happened into the file instead of comparing it: read the difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.inspect.snapshot import room_states, snapshot
from kvd.wire import admin, client
from kvd.wire.peer import Abort, Accept, Closed, Offer, Settled
from tests.core.world import Side, World, tokens
from tests.stories.told import effect_line, event_line, input_line, message_line

if TYPE_CHECKING:
    from pathlib import Path

    from kvd.core.effects import Step
    from kvd.core.inputs import Input
    from kvd.types import Tokens
    from tests.core.side import Letter

RULE = "----"
LOSABLE = {kind.__name__: kind for kind in (Abort, Accept, Closed, Offer, Settled)}


class ToldWorld(World):
    """A world that writes down what happens."""

    def __init__(self, **fields: object) -> None:
        self.lines: list[str] = []
        super().__init__(**fields)  # type: ignore[arg-type]
        self.lines.clear()

    def happened(self, side: Side, happened: Input, step: Step) -> None:
        line = input_line(happened, side.name)
        self.lines += [line] if line else []
        told = [event_line(event) for event in step.events]
        told += [effect_line(effect) for effect in step.effects]
        self.lines += [f"{side.name}  {line}" for line in told if line]

    def is_lost(self, letter: Letter) -> bool:
        is_lost = super().is_lost(letter)
        line = message_line(letter.message)
        if is_lost and line:
            self.lines.append(f"{letter.sender.name} -> {letter.to.name}  {line}   (lost)")
        return is_lost


class Story:
    """One world, its prompts by name, and the handoffs by room."""

    def __init__(self) -> None:
        self.world = ToldWorld()
        self.prompts: dict[str, Tokens] = {}
        self.sends: dict[tuple[str, str], tuple[client.Leased, int, str]] = {}
        self.receives: dict[str, int] = {}
        self.sources: tuple[str, ...] = ("p",)

    def play(self, command: str) -> list[str]:
        """Carry out one command; what happened."""
        self.world.lines = []
        verb, *words = command.split()
        getattr(self, f"do_{verb}")(*words)
        return self.world.lines

    # ---- the world ---------------------------------------------------------------------------

    def do_world(self, p_pages: str, d_pages: str) -> None:
        """Begin anew with pools of so many pages, null page included."""
        self.world = ToldWorld(p_pages=int(p_pages), d_pages=int(d_pages))

    def do_sources(self, *names: str) -> None:
        """Begin anew with several prefill sides; a receive is from all of them."""
        self.world = ToldWorld(sources=names)
        self.sources = names

    def do_prompt(self, name: str, *ranges: str) -> None:
        """``prompt A 1+64 900+10``: tokens 1..64, then 900..909."""
        parts = [(int(first), int(n)) for first, n in (one.split("+") for one in ranges)]
        self.prompts[name] = tokens(*parts)

    def do_wait(self, seconds: str) -> None:
        self.world.pass_time(float(seconds))

    def do_lose(self, kind: str) -> None:
        """``lose Settled``: from now on; ``lose nothing``: no more."""
        self.world.lost = set() if kind == "nothing" else {LOSABLE[kind]}

    def do_silence(self, side: str) -> None:
        self.world.cut = set() if side == "nobody" else {side}

    def do_hold(self, what: str) -> None:
        """``hold posts``: they leave and do not arrive."""
        assert what == "posts"
        self.world.hold_posts = True

    def do_land(self, what: str) -> None:
        """``land posts``: the held ones arrive."""
        assert what == "posts"
        self.world.hold_posts = False
        self.world.land_posts()

    def do_restart(self, name: str) -> None:
        """The daemon is killed and comes back; its engine attaches again."""
        side = self.world.sides[name]
        self.world.restart(side)
        side.attach()

    def do_fence(self, name: str) -> None:
        self.world.sides[name].ask(admin.Fence(1))

    # ---- engines -----------------------------------------------------------------------------

    def do_cache(self, name: str, prompt: str) -> None:
        """The engine of a side computes a prompt of its own and leaves it cached."""
        side, toks = self.world.sides[name], self.prompts[prompt]
        lease = side.lease(toks)
        side.write(lease.pages, toks)
        side.call(client.CommitAndRelease, lease=lease.lease)

    def do_send(self, prompt: str, room: str, name: str = "p") -> None:
        """The prefill engine leases the prompt and opens the room."""
        toks, side = self.prompts[prompt], self.world.sides[name]
        lease = side.lease(toks)
        reply = side.call(client.SendRequest, toks, room=int(room), lease=lease.lease)
        if isinstance(reply, client.Sending):
            self.sends[room, name] = (lease, reply.send, prompt)

    def do_advance(self, room: str, upto: str, name: str = "p") -> None:
        (lease, send, prompt), side = self.sends[room, name], self.world.sides[name]
        side.write(lease.pages, self.prompts[prompt], end=int(upto))
        side.call(client.Advance, send=send, upto_tokens=int(upto))

    def do_finish(self, room: str, aux: str, name: str = "p") -> None:
        """All is written; the engine lets its own lease go at once."""
        (lease, send, prompt), side = self.sends[room, name], self.world.sides[name]
        side.write(lease.pages, self.prompts[prompt])
        side.call(client.Finish, send=send, aux=aux.encode())
        side.call(client.ReleaseLease, lease=lease.lease)

    def do_fail(self, room: str, *reason: str) -> None:
        """The prefill engine gives up; of several, the one that is named first."""
        name, words = (reason[0], reason[1:]) if reason[0] in self.sources else ("p", reason)
        send = self.sends[room, name][1]
        self.world.sides[name].call(client.AbortSend, send=send, reason=" ".join(words))

    def do_receive(self, prompt: str, room: str, deadline_s: str = "30") -> None:
        reply = self.world.d.call(
            client.ReceiveRequest,
            self.prompts[prompt],
            room=int(room),
            source=self.sources,
            deadline_s=float(deadline_s),
        )
        if isinstance(reply, client.Receiving):
            self.receives.setdefault(room, reply.receive)

    def do_cancel(self, room: str) -> None:
        self.world.d.call(client.CancelReceive, receive=self.receives[room])

    def do_release(self, lease: str) -> None:
        self.world.d.call(client.ReleaseLease, lease=int(lease))

    def do_check(self, room: str, prompt: str) -> None:
        """The decode engine reads what it received."""
        got = [one for one in self.world.d.answers if isinstance(one, client.Received)]
        (mine,) = [one for one in got if one.receive == self.receives[room]]
        assert self.world.d.holds(mine.pages, self.prompts[prompt])
        self.world.lines.append("d  reads what the prefill engine wrote, every page")

    def do_show(self, name: str) -> None:
        """Pages by state, and what is open."""
        node = self.world.sides[name].node
        pool = snapshot(node).pools[0]
        self.world.lines.append(
            f"{name}  {pool.free_pages} free, {pool.held_pages} held, {pool.cached_pages} cached "
            f"({pool.locked_pages} locked), {pool.quarantined_pages} in quarantine"
        )
        for room in room_states(node):
            self.world.lines.append(
                f"{name}  room {room.room} {room.state}, waits for {room.waiting_for}"
            )


def play(path: Path) -> tuple[str, str]:
    """The story as it is written, and as it happened."""
    written = path.read_text()
    story, happened, is_output = Story(), [], False
    for line in written.splitlines():
        if line == RULE:
            is_output = True
        elif not line or line.startswith("#"):
            is_output = False
            happened.append(line)
        elif not is_output:
            happened += [line, RULE, *story.play(line)]
    return written, "\n".join(happened) + "\n"
