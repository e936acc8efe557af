"""What the daemon answered, as tables for people. JSON is printed by ``print_json`` instead.

Every text of the daemon goes through ``clean`` and becomes a ``Text``: never markup, never a
control character. Off a terminal there are no colours and no line is folded. State is never carried
by colour alone.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvd.cli import audited, pools
from kvd.cli.sheet import TextTable, nothing, said, state
from kvd.text import amount, clean, duration, progress, room
from kvd.types import short

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvd.wire.admin import Because, Beside, OtherEnd, Report, Tree, TreeNode
    from kvd.wire.snapshot import (
        ClientState,
        DrainState,
        HeldState,
        LeaseState,
        PeerState,
        RecorderState,
        RoomState,
        Snapshot,
        WaitingState,
    )

PLAIN_WIDTH = 4096
"""Columns where the output is no terminal: no table is wider, so nothing is folded."""


def show(*blocks: RenderableType) -> None:
    """Print blocks, one below the other."""
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    console = Console(markup=False, highlight=False, emoji=False, width=width)
    with console.capture() as printed:
        for block in blocks:
            console.print(block)
    for line in printed.get().splitlines():
        click.echo(line.rstrip())


def answer(form: str, value: object, *blocks: RenderableType) -> None:
    """What a verb prints: ``value`` as JSON, or for people the blocks that say the same."""
    if form == "json":
        print_json(value)
    else:
        show(*blocks)


def print_json(value: object, *, indent: int = 2) -> None:
    """Print a value as JSON, alone on the standard output."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=indent))


# ---- status --------------------------------------------------------------------------------------


def status(shot: Snapshot) -> RenderableType:
    """The node on one screen: who, how full, what is under way, and what is wrong."""
    head = Text.assemble(
        said(shot.node, "bold"),
        "  ",
        state(shot.state),
        f"  kvd {clean(shot.version)}  up {duration(shot.uptime_s)}",
        f"  incarnation {clean(short(shot.incarnation))}",
        f"\ntransport {clean(shot.transport)}, generation {shot.generation}",
        f"; {shot.totals.steps} steps, {shot.last_event} events",
    )
    held = sum(lease.held_pages for lease in shot.leases)
    beside = Counter[str]()
    for lease in shot.leases:
        beside.update({one.component: one.held_pages for one in lease.beside})
    holding = ", ".join([f"{held} pages", *(f"{n} of {clean(of)}" for of, n in beside.items())])
    engines = ", ".join(clean(_engine(one)) for one in shot.clients)
    rows = Table.grid(padding=(0, 2))
    for name, text in (
        ("engines", f"{len(shot.clients)}  {engines}"),
        ("leases", f"{len(shot.leases)}  holding {holding}; {len(shot.waiting)} wait for room"),
        ("rooms", f"{len(shot.rooms)}  {_tally(one.side for one in shot.rooms)}"),
        ("peers", f"{len(shot.peers)}  {_tally(one.state for one in shot.peers)}"),
        ("handoffs", _handoffs(shot)),
        ("audit", audited.summary(shot.audit)),
        ("recorder", _recorder(shot.recorder)),
    ):
        rows.add_row(Text(name, style="bold"), Text(text.rstrip()))
    alarms = audited.broken(shot.audit)
    return Group(*alarms, head, Text(), pools.table(shot.pools), Text(), rows, *_troubles(shot))


def _engine(one: ClientState) -> str:
    """Its name and processes, and that it is not served now, where that is so."""
    state = "" if one.state == "attached" else f" {one.state}"
    return f"{one.name} {list(one.pids)}{state}"


def _handoffs(shot: Snapshot) -> str:
    """Since the start: how many, and how many bytes were sent, received and not needed."""
    totals = shot.totals
    return (
        f"{totals.handoffs_delivered} delivered, {totals.handoffs_failed} failed; "
        f"sent {amount(totals.sent_bytes)}, received {amount(totals.received_bytes)}, "
        f"saved {amount(totals.saved_bytes)}"
    )


def _recorder(one: RecorderState) -> str:
    """Whether a recording could be saved, and how much it would hold."""
    if one.state == "recording":
        return (
            f"{duration(one.covered_s)} back, {one.inputs} inputs, {amount(one.record_bytes)}; "
            f"since {duration(one.since_s)}"
        )
    if one.state == "off":
        return f"off  {clean(one.why)}"
    return f"{clean(one.state)} {duration(one.since_s)} ago: {clean(one.why)}"


def _tally(names: Iterable[str]) -> str:
    """``decode 2, prefill 1``."""
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{clean(name)} {counts[name]}" for name in sorted(counts))


def _drain(one: DrainState) -> str:
    """Who drains this node and why, what is left, and how to end it."""
    by = f" by {clean(one.who)}" if one.who else ""
    why = f" ({clean(one.why)})" if one.why else ""
    left = f"{one.receives} receives, {one.sends} sends and {one.waiting} requests under way"
    until = "" if one.deadline_in_s is None else f", given up in {duration(one.deadline_in_s)}"
    if one.is_stop:
        return f"it stops, asked {duration(one.since_s)} ago{why}: {left}{until}"
    now = "nothing is under way any more" if one.is_drained else f"{left}{until}"
    return f"drained for {duration(one.since_s)}{by}{why}: {now}; kvd undrain serves again"


def _troubles(shot: Snapshot) -> list[Text]:
    """What an operator should look at, each with the verb that says more."""
    found = [_drain(shot.drain)] if shot.drain is not None else []
    found += [f"{clean(peer.drain)}: kvd peers" for peer in shot.peers if peer.drain]
    found += [
        f"{clean(peer.name)} is {clean(peer.state)}, silent {duration(peer.silent_s)}: kvd peers"
        for peer in shot.peers
        if peer.state in {"suspect", "lost"}
    ]
    found += [
        f"{clean(one.name)} of before the restart has not come back for {duration(one.age_s)}, "
        f"{one.former_leases} leases with {one.held_pages} pages wait for it: kvd locks"
        for one in shot.clients
        if one.state == "awaited" and one.leases
    ]
    found += [
        f"kvd hung up on {clean(one.name)} and keeps {one.leases} leases with {one.held_pages} "
        f"pages until pid {', '.join(map(str, one.pids))} ends: {clean(one.why)}"
        for one in shot.clients
        if one.state == "hung-up-on"
    ]
    quarantined = sum(pool.quarantined_pages for pool in shot.pools)
    if quarantined:
        found.append(f"{quarantined} pages are quarantined, a remote may still write: kvd locks")
    if shot.waiting:
        longest_s = max(one.waited_s for one in shot.waiting)
        found.append(f"a request has waited {duration(longest_s)} for room: kvd locks")
    healed = shot.totals.violations - shot.audit.findings
    if healed > 0:
        found.append(f"{healed} rules were found broken, and are not any more: kvd audit")
    return [Text(f"! {line}", style="yellow") for line in found]


# ---- leases and the queue ------------------------------------------------------------------------


def leases(states: tuple[LeaseState, ...]) -> RenderableType:
    """Who holds what, why, since when."""
    out = TextTable(
        "LEASE>", "STATE", "OWNER", "REASON", "ROOM", "PREFIX>", "HELD>", "QUAR>", "AGE>"
    )
    for one in states:
        facts = [f"held by {', '.join(one.holders)}"] if one.holders else []
        facts += [f"namespace {one.namespace}"] if one.namespace else []
        facts += [_beside(one)] if any(has.mapped_pages for has in one.beside) else []
        facts += [_saved(one)] if one.saved_pages or one.retracted_s else []
        facts += [f"waits for {one.waiting_for}"] if one.waiting_for else []
        out.row(
            str(one.id),
            state(one.state),
            f"{one.owner}[{one.pid}]",
            one.reason,
            room(one.room),
            f"{one.prefix_tokens}/{one.prompt_tokens}",
            str(one.held_pages),
            str(one.quarantined_pages),
            duration(one.age_s),
            prose="; ".join(facts),
        )
    return out if states else nothing("leases")


def _beside(one: LeaseState) -> str:
    """Its pages of further components: its own, and those in its row that it shares."""
    return f"beside {', '.join(_held(has) for has in one.beside if has.mapped_pages)}"


def _held(has: HeldState) -> str:
    nodes = ", ".join(str(node) for node in has.needed_nodes)
    locks = f", locks it at node {nodes}" if nodes else ""
    return f"{has.component} {has.held_pages} ({has.mapped_pages} in its row{locks})"


def _saved(one: LeaseState) -> str:
    """Since when it is retracted, and how much of it is saved."""
    since = f"retracted {duration(one.retracted_s)} ago, " if one.retracted_s else ""
    return f"{since}{one.saved_pages} pages ({amount(one.saved_bytes)}) saved"


def waiting(states: tuple[WaitingState, ...]) -> RenderableType:
    """The admission queue, in the order in which it is served."""
    out = TextTable("WAITING", "OWNER", "ROOM", "PRIORITY>", "WAITED>", "ENDS IN>", "PAGES>")
    for one in states:
        out.row(
            one.kind,
            one.owner,
            room(one.room),
            str(one.priority),
            duration(one.waited_s),
            duration(one.deadline_in_s),
            str(one.needed_pages),
            prose="; ".join([one.why, *(f"held by {who}" for who in one.held_by)]),
        )
    return out if states else nothing("requests waiting for room")


# ---- rooms and peers -----------------------------------------------------------------------------


def rooms(states: tuple[RoomState, ...]) -> RenderableType:
    """Handoffs on this side: state, progress, and what each waits for."""
    out = TextTable("ROOM", "SIDE", "STATE", "PEER", "PREFIX>", "PAGES>", "AGE>", "ENDS IN>")
    for one in states:
        facts = [f"part {one.part} of {one.owner}" if one.owner else f"part {one.part}"]
        facts += [one.share] if one.share else []
        facts.append(f"{amount(one.moved_bytes)} of {amount(one.total_bytes)}")
        facts += [f"waits for {one.waiting_for}"] if one.waiting_for else []
        out.row(
            room(one.room),
            one.side,
            state(one.state),
            one.peer,
            f"{one.decode_prefix_len}/{one.prompt_tokens}",
            progress(one),
            duration(one.age_s),
            duration(one.deadline_in_s),
            prose="; ".join(facts),
        )
    return out if states else nothing("rooms")


def stories(states: tuple[RoomState, ...]) -> RenderableType:
    """The last transitions of each room, oldest first."""
    lines: list[Text] = []
    for one in states:
        head = f"\nroom {one.room} {clean(one.side)} part {one.part}, handoff {one.handoff}, "
        tail = f"lease {one.lease}, {one.outstanding_posts} posts outstanding"
        lines.append(Text(head + tail, style="bold"))
        lines += [said(f"  {step}") for step in one.story]
    return Group(*lines)


def peers(states: tuple[PeerState, ...]) -> RenderableType:
    """Other daemons: link, sending agent, and how long they have been silent."""
    out = TextTable("PEER", "STATE", "SILENT>", "RTT>", "RECEIVES>", "SENDS>", "AGENT")
    for one in states:
        out.row(
            one.name,
            state(one.state),
            duration(one.silent_s),
            f"{one.round_trip_ms:.2f} ms",
            str(one.open_receives),
            str(one.open_sends),
            one.agent,
            prose="\n".join(_about_peer(one)),
        )
    return out if states else nothing("peers: name them in peers.connect")


def _about_peer(one: PeerState) -> list[str]:
    """What has no column."""
    life = f"incarnation {short(one.incarnation)}, generation {one.generation}"
    lines = [f"{one.address}, {life}", f"layout {one.layout}"]
    return [*lines, *[text for text in (one.drain, one.trouble) if text]]


# ---- tree, why, reports --------------------------------------------------------------------------


def tree(answer: Tree) -> RenderableType:
    """Nodes indented below their parents."""
    beside = list(dict.fromkeys(one.component for node in answer.nodes for one in node.beside))
    headings = [clean(name).upper() for name in beside]
    out = TextTable("NODE", "TOKENS", "PAGES>", "HITS>", "LOCKS>", *headings, "BEGINS WITH")
    depths: dict[int, int] = {}
    for node in answer.nodes:
        depth = depths.get(node.parent, -1) + 1
        depths[node.id] = depth
        there = {one.component: one for one in node.beside}
        out.row(
            _node_name(node, depth),
            f"{node.start_tokens}..{node.end_tokens}",
            str(node.pages),
            str(node.hits),
            str(node.lock_ref),
            *(_lies(there.get(name)) for name in beside),
            " ".join(str(token) for token in node.first_tokens),
            prose=f"locked by {', '.join(node.holders)}" if node.holders else "",
        )
    if not answer.nodes:
        return nothing("cached pages")
    rest = answer.total - len(answer.nodes)
    more = [Text(f"... and {rest} nodes more: --limit {answer.total}", style="dim")] if rest else []
    return Group(out, *more)


def _lies(one: Beside | None) -> str:
    """What lies at a node of one component, and how many leases need it."""
    if one is None:
        return "-"
    if not one.pages:
        return "tombstone"
    return f"{one.pages}, locks {one.locks}" if one.locks else str(one.pages)


def _node_name(node: TreeNode, depth: int) -> str:
    """The node's id, indented; the namespace at the top only, where it begins."""
    namespace = f" [{node.namespace}]" if node.namespace and depth <= 1 else ""
    return f"{'  ' * depth}{node.id}{namespace}"


def because(answer: Because) -> RenderableType:
    """The sentence that answers, the facts behind it, and what else to ask about."""
    facts = [said(f"  {fact}") for fact in answer.facts]
    links = [said(f"  see also {', '.join(answer.links)}", "dim")] if answer.links else []
    return Group(said(answer.sentence, "bold"), *facts, *links)


def other_ends(ends: Iterable[OtherEnd]) -> RenderableType:
    """What the peers say of a room, each with its story; or why they say nothing."""
    lines = []
    for end in ends:
        who = f"at the other end of {end.ours.replace(':', ' ')}, {end.peer or end.side}"
        if end.why_none:
            lines.append(said(f"{who}: {end.why_none}"))
            continue
        lines.append(
            said(
                f"{who}: {end.state} on the {end.side} side, waits for "
                f"{end.waiting_for or 'nothing'}; heard in {end.round_trip_s * 1e3:.1f} ms"
            )
        )
        lines.append(
            said(
                f"  prompt {end.prompt_tokens} tokens, decode_prefix_len {end.decode_prefix_len}, "
                f"{end.moved_bytes} of {end.total_bytes} bytes moved, {end.outstanding_posts} "
                f"posts under way, {end.deadline_in_s:.1f} s to its deadline"
            )
        )
        lines += [said(f"  {mark.ago_s:.3f} s ago: {mark.what}") for mark in end.marks]
    return Group(*lines)


def report(answer: Report) -> RenderableType:
    """What changed, then what was refused and why."""
    changed = [said(f"{name.replace('_', ' ')}: {n}") for name, n in answer.changed.items()]
    refused = [said(f"refused: {why}", "yellow") for why in answer.refused]
    notes = [said(note) for note in answer.notes]
    return Group(*(changed or [Text("nothing changed")]), *notes, *refused)
