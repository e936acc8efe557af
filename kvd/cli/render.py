"""What the daemon answered, as tables for people; or as JSON, as it came.

Every text of the daemon goes through ``clean`` and becomes a ``Text``: never markup, never a
control character. Off a terminal there are no colours and no line is folded. State is never carried
by colour alone.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvd.core.layout.shards import span
from kvd.text import amount, bar, clean, counted, duration, progress, room
from kvd.types import short
from kvd.wire.page_address import in_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvd.wire import snapshot as shown
    from kvd.wire.admin import Because, Beside, OtherEnd, Report, Tree
    from kvd.wire.snapshot import PoolState, Snapshot

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


_STYLES = {
    "serving": "green",
    "ready": "green",
    "up": "green",
    "suspect": "yellow",
    "lingering": "yellow",
    "draining": "yellow",
    "drained": "yellow",
    "stopping": "yellow",
    "quarantined": "yellow",
    "saving": "yellow",
    "retracted": "yellow",
    "resuming": "yellow",
    "restoring": "yellow",
    "lost": "bold red",
    "refused": "bold red",
}


def said(text: str, style: str = "") -> Text:
    """A text of the daemon, made safe."""
    return Text(clean(text), style=style)


def state(name: str) -> Text:
    """A state, coloured where it deserves attention."""
    return said(name, _STYLES.get(name, ""))


class TextTable:
    """Rows below headings, each with lines of prose under it where there is more to say.

    A column is as wide as its widest cell, so nothing is folded or cut into an ellipsis; what does
    not fit 80 columns belongs into the prose. Headings that end in ``>`` stand over figures.
    """

    def __init__(self, *headings: str) -> None:
        self._is_figure = [heading.endswith(">") for heading in headings]
        self._rows = [[Text(heading.rstrip(">"), "bold") for heading in headings]]
        self._prose: list[list[str]] = [[]]

    def row(self, *cells: str | Text, prose: str = "") -> None:
        """Add a row; texts are made safe here."""
        self._rows.append([cell if isinstance(cell, Text) else said(cell) for cell in cells])
        self._prose.append([clean(line) for line in prose.split("\n") if line])

    def __rich__(self) -> Group:
        """The lines."""
        widths = [max(cell.cell_len for cell in column) for column in zip(*self._rows, strict=True)]
        lines: list[Text] = []
        for row, prose in zip(self._rows, self._prose, strict=True):
            line = Text()
            for cell, width, is_figure in zip(row, widths, self._is_figure, strict=True):
                blank = " " * (width - cell.cell_len)
                line.append_text(Text(blank) + cell if is_figure else cell + Text(blank))
                line.append("  ")
            line.rstrip()
            lines.append(line)
            lines += [Text(f"    {more}", "dim") for more in prose]
        return Group(*lines)


MAX_FAMILIES = 8
"""Families of namespaces in a status; --format json has all."""


def _epochs(by_family: dict[str, int]) -> str:
    """The epoch of each family that was told of new weights."""
    first = [
        clean(f"{family or '(no name)'} {epoch}")
        for family, epoch in list(by_family.items())[:MAX_FAMILIES]
    ]
    more = len(by_family) - len(first)
    return f"{len(by_family)}  {', '.join(first)}{f' and {more} more' if more else ''}"


def nothing(what: str) -> Text:
    """The line that stands where a table would be empty."""
    return Text(f"no {what}", style="dim")


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
    engines = ", ".join(
        clean(f"{one.name} {list(one.pids)}{'' if one.state == 'attached' else f' {one.state}'}")
        for one in shot.clients
    )
    totals = shot.totals
    handoffs = (
        f"{totals.handoffs_delivered} delivered, {totals.handoffs_failed} failed; "
        f"sent {amount(totals.sent_bytes)}, received {amount(totals.received_bytes)}, "
        f"saved {amount(totals.saved_bytes)}"
    )
    rows = Table.grid(padding=(0, 2))
    for name, text in (
        ("engines", f"{len(shot.clients)}  {engines}"),
        ("leases", f"{len(shot.leases)}  holding {holding}; {len(shot.waiting)} wait for room"),
        ("rooms", f"{len(shot.rooms)}  {_tally(one.side for one in shot.rooms)}"),
        ("peers", f"{len(shot.peers)}  {_tally(one.state for one in shot.peers)}"),
        ("handoffs", handoffs),
        *([("epochs", _epochs(shot.epochs))] if shot.epochs else []),
        ("audit", _audit_summary(shot.audit)),
        ("recorder", _recorder(shot.recorder)),
    ):
        rows.add_row(Text(name, style="bold"), Text(text.rstrip()))
    alarms = [
        Text(f"! {clean(one.rule)}: {clean(one.what)}: kvd audit", style="bold red")
        for one in shot.audit.found
        if one.state == BROKEN
    ]
    return Group(*alarms, head, Text(), pools(shot.pools), Text(), rows, *_troubles(shot))


def _recorder(one: shown.RecorderState) -> str:
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
    counts = Counter(names)
    return ", ".join(f"{clean(name)} {counts[name]}" for name in sorted(counts))


def _drain(one: shown.DrainState) -> str:
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


# ---- pools ---------------------------------------------------------------------------------------


_PLACES = {"host": " in host memory"}
"""What is said of a tier; most pages are on the device, and that goes without saying."""


def pools(states: tuple[PoolState, ...]) -> RenderableType:
    """Pages by state; the last column says whether they add up to the total (I1)."""
    if not states:
        return nothing("pools")
    out = TextTable(
        *("POOL", "TOTAL>", "FREE>", "HELD>", "CACHED>", "LOCKED>", "EVICTABLE>", "QUAR>", "SUM"),
    )
    for one in states:
        counts = (
            one.total_pages,
            one.free_pages,
            one.held_pages,
            one.cached_pages,
            one.locked_pages,
            one.evictable_pages,
            one.quarantined_pages,
        )
        out.row(
            f"{one.pool}/{one.component}",
            *(str(count) for count in counts),
            _sum_check(one),
            prose="\n".join(_prose(one)),
        )
    if len(states) == 1 and not states[0].companions:
        return out
    return Group(out, Text(_total_bytes(states), "dim"))


def _prose(one: PoolState) -> Iterator[str]:
    """What a page is, what goes in lockstep with it, and what windows and buffers save."""
    cells = bar(
        held=one.held_pages,
        cached=one.cached_pages,
        quarantined=one.quarantined_pages,
        total=one.total_pages,
        width=32,
    )
    yield f"[{cells}] {_page_in_words(one)}"
    if one.shards:
        yield _shards(one)
    for beside in one.companions:
        yield (
            f"with {beside.component}: {counted(beside.pages_each, 'page')} of {beside.page_size} "
            f"tokens for each, {amount(beside.page_bytes)} a page{_PLACES.get(beside.tier, '')}"
        )
    if (window := one.window) is not None:
        full = window.full_pages
        of = f" ({100 * window.mapped_pages / full:.0f} %)" if full else ""
        yield (
            f"window of {window.window_tokens} tokens: {window.mapped_pages} pages mapped, "
            f"{full} with full allocation{of}; {window.slides} slides"
        )
    if (buffer := one.buffer) is not None:
        wanted = buffer.hits + buffer.misses
        of = f" ({100 * buffer.hits / wanted:.1f} % were there)" if wanted else ""
        yield (
            f"at most {buffer.request_tokens} tokens of a request; {buffer.hits} hits, "
            f"{buffer.misses} misses{of}, {amount(buffer.copied_bytes)} copied"
        )
    if one.promised_pages:
        there = one.free_pages + one.evictable_pages
        yield f"{one.promised_pages} of {there} free and evictable pages are promised to leases"
    if one.saved_capacity_pages and one.page_bytes:
        kept = amount(one.saved_pages * _whole_bytes(one))
        yield (
            f"saved area: {one.saved_pages} of {one.saved_capacity_pages} pages hold {kept} of "
            "retracted leases"
        )


def _page_in_words(one: PoolState) -> str:
    """What a page is and where; where pages are only counted, that they hold nothing."""
    if one.page_bytes:
        what = "one state" if one.extent == "per-request" else f"{one.page_size} tokens"
        interior = "" if one.interior == "nhd" else f", {one.interior} inside"
        tag = f", packed by {one.tag}" if one.tag else ""
        return f"{what}, {amount(one.page_bytes)} a page{_PLACES.get(one.tier, '')}{interior}{tag}"
    tokens = f"{(one.total_pages - 1) * one.page_size} tokens are counted, no byte is held"
    if not one.placeholder_bytes:
        return tokens
    return f"{tokens}; a placeholder of one page has {amount(one.placeholder_bytes)}"


def _shards(one: PoolState) -> str:
    """Of which layers and heads of the model the shards are, and what a page takes in each."""
    n_shards, first = len(one.shards), one.shards[0]
    heads = list(dict.fromkeys((shard.first_head, shard.end_head) for shard in one.shards))
    spans = " | ".join(span("head", *each) for each in heads)
    copies = f", {n_shards // len(heads)} of each" if n_shards > len(heads) else ""
    layers = span("layer", first.first_layer, first.end_layer)
    each = amount(one.page_bytes // n_shards)
    return f"{counted(n_shards, 'shard')} of {each} a page: {layers} of {spans}{copies}"


def _total_bytes(states: tuple[PoolState, ...]) -> str:
    """All components in bytes; a companion's go with the pages that they belong to."""
    bytes_each = [_whole_bytes(one) for one in states]
    sums = {
        "": [one.total_pages for one in states],
        " free": [one.free_pages for one in states],
        " held": [one.held_pages for one in states],
        " cached": [one.cached_pages for one in states],
        " quarantined": [one.quarantined_pages for one in states],
    }
    parts = [
        f"{amount(sum(map(int.__mul__, pages, bytes_each)))}{name}" for name, pages in sums.items()
    ]
    names = [
        name for one in states for name in (one.component, *(c.component for c in one.companions))
    ]
    return f"total of {clean(', '.join(names))}: {parts[0]}; {', '.join(parts[1:])}"


def _whole_bytes(one: PoolState) -> int:
    """Of a page and of what is in lockstep with it."""
    return one.page_bytes + sum(each.pages_each * each.page_bytes for each in one.companions)


def _sum_check(one: PoolState) -> Text:
    """Whether null, free, held, cached and quarantined pages make the total."""
    found = 1 + one.free_pages + one.held_pages + one.cached_pages + one.quarantined_pages
    found += one.condemned_pages
    if found == one.total_pages:
        if one.condemned_pages:
            return Text(f"ok, {one.condemned_pages} condemned", style="yellow")
        return Text("ok", style="green")
    return Text(f"WRONG: {found} of {one.total_pages}; kvd audit", style="bold red")


# ---- leases and the queue ------------------------------------------------------------------------


def leases(states: tuple[shown.LeaseState, ...]) -> RenderableType:
    """Who holds what, why, since when."""
    out = TextTable(
        "LEASE>", "STATE", "OWNER", "REASON", "ROOM", "PREFIX>", "HELD>", "QUAR>", "AGE>"
    )
    for one in states:
        facts = [f"held by {', '.join(one.holders)}"] if one.holders else []
        facts += [f"namespace {one.namespace}"] if one.namespace else []
        # Pages of further components: its own, and those in its row that it shares.
        beside = ", ".join(_held(has) for has in one.beside if has.mapped_pages)
        facts += [f"beside {beside}"] if beside else []
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


def _held(has: shown.HeldState) -> str:
    nodes = ", ".join(str(node) for node in has.needed_nodes)
    locks = f", locks it at node {nodes}" if nodes else ""
    return f"{has.component} {has.held_pages} ({has.mapped_pages} in its row{locks})"


def _saved(one: shown.LeaseState) -> str:
    """Since when it is retracted, and how much of it is saved."""
    since = f"retracted {duration(one.retracted_s)} ago, " if one.retracted_s else ""
    return f"{since}{one.saved_pages} pages ({amount(one.saved_bytes)}) saved"


def waiting(states: tuple[shown.WaitingState, ...]) -> RenderableType:
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


def rooms(states: tuple[shown.RoomState, ...]) -> RenderableType:
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


def stories(states: tuple[shown.RoomState, ...]) -> RenderableType:
    """The last transitions of each room, oldest first."""
    lines: list[Text] = []
    for one in states:
        head = f"\nroom {one.room} {clean(one.side)} part {one.part}, handoff {one.handoff}, "
        tail = f"lease {one.lease}, {one.outstanding_posts} posts outstanding"
        lines.append(Text(head + tail, style="bold"))
        lines += [said(f"  {step}") for step in one.story]
    return Group(*lines)


def peers(states: tuple[shown.PeerState, ...]) -> RenderableType:
    """Other daemons: link, sending agent, and how long they have been silent."""
    out = TextTable("PEER", "STATE", "SILENT>", "RTT>", "RECEIVES>", "SENDS>", "AGENT")
    for one in states:
        life = f"incarnation {short(one.incarnation)}, generation {one.generation}"
        lines = [f"{one.address}, {life}", f"layout {one.layout}", one.drain, one.trouble]
        out.row(
            one.name,
            state(one.state),
            duration(one.silent_s),
            f"{one.round_trip_ms:.2f} ms",
            str(one.open_receives),
            str(one.open_sends),
            one.agent,
            prose="\n".join(lines),
        )
    return out if states else nothing("peers: name them in peers.connect")


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
        # The namespace at the top only, where it begins.
        namespace = f" [{node.namespace}]" if node.namespace and depth <= 1 else ""
        out.row(
            f"{'  ' * depth}{node.id}{namespace}",
            f"{node.start_tokens}..{node.end_tokens}",
            str(node.pages),
            str(node.hits),
            str(node.lock_ref),
            *(_lies(there.get(name)) for name in beside),
            in_words(array("i", node.first_tokens).tobytes()),
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


# ---- the audit -----------------------------------------------------------------------------------


BROKEN = "broken"
"""The state of a finding that is there now."""


def _audit_summary(state: shown.AuditState) -> str:
    """How the standing audit stands, on one line."""
    found = f"{state.findings} finding{'' if state.findings == 1 else 's'}"
    if not state.sweeps:
        return f"{found}; no sweep has ended yet"
    return (
        f"{found}; the last sweep took {duration(state.sweep_s)}, ended "
        f"{duration(state.last_sweep_ago_s)} ago; {100 * state.share:.2f} % of a core"
    )


def audit(answer: Report) -> RenderableType:
    """What was checked, each rule that does not hold, and how the standing audit runs."""
    lines = [Text(f"{clean(name.replace('_', ' '))}: {n}") for name, n in answer.changed.items()]
    state = answer.standing
    if state is None:
        lines += [Text(f"broken: {clean(what)}", style="bold red") for what in answer.refused]
    else:
        lines += _standing(state)
        for one in state.found:
            lines += _finding(one)
    if not is_broken(answer):
        lines.append(Text("every invariant holds", style="green"))
    return Group(*lines)


def is_broken(answer: Report) -> bool:
    """Whether anything does not hold now."""
    return bool(answer.refused) or (answer.standing is not None and answer.standing.findings > 0)


def _standing(state: shown.AuditState) -> list[Text]:
    per_s = (state.objects + state.pages) / max(state.sweep_s, 1e-3)
    return [
        Text(f"standing audit: {_audit_summary(state)}"),
        Text(
            f"    {state.sweeps} sweeps, {state.spent_s:.2f} s of processor time; {state.objects} "
            f"objects and {state.pages} pages in the last one, {per_s:,.0f} a second",
            "dim",
        ),
    ]


def _finding(one: shown.Finding) -> list[Text]:
    style = "bold red" if one.state == BROKEN else "yellow"
    about = [
        *([f"lease {one.lease}"] if one.lease else []),
        *([f"node {one.node}"] if one.node else []),
        *([f"{one.owner}[{one.pid}]"] if one.owner else []),
        *([f"room {one.room}"] if one.room else []),
        *([_pages(one)] if one.pages else []),
        f"first seen {duration(one.first_seen_ago_s)} ago",
        f"last {duration(one.last_seen_ago_s)} ago",
    ]
    return [
        Text(f"{clean(one.state)}: {clean(one.rule)}: {clean(one.what)}", style=style),
        Text(f"    {clean(', '.join(about))}"),
        *([Text(f"    done: {clean(one.done)}")] if one.done else []),
        *(Text(f"    {clean(line)}", "dim") for line in one.transitions),
    ]


def _pages(one: shown.Finding) -> str:
    more = ["..."] if one.pages > len(one.first_pages) else []
    some = " ".join([*map(str, one.first_pages), *more])
    return f"{one.pages} pages{f' of {one.component}' if one.component else ''}: {some}"
