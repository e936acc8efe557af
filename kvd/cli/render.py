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
from msgspec import UNSET
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvd.core.layout.shards import span
from kvd.text import bar, clean, counted, duration, progress, room
from kvd.types import amount, short
from kvd.wire.page_address import in_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvd.wire import snapshot as shown
    from kvd.wire.admin import Because, Beside, OtherEnd, Report, Tree
    from kvd.wire.snapshot import PoolState, QuotaState, Snapshot

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


def print_json(value: object) -> None:
    """Print a value as JSON, alone on the standard output."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


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


MAX_EPOCHS = 8
"""Epochs in a status; --format json has all."""


def _epochs(by_base: dict[str, int]) -> str:
    """The epoch of each base that was told of new weights."""
    first = [
        clean(f"{base or '(no name)'} {epoch}")
        for base, epoch in list(by_base.items())[:MAX_EPOCHS]
    ]
    more = len(by_base) - len(first)
    return f"{len(by_base)}  {', '.join(first)}{f' and {more} more' if more else ''}"


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
        beside.update({component.component: component.held_pages for component in lease.beside})
    holding = ", ".join([f"{held} pages", *(f"{n} of {clean(of)}" for of, n in beside.items())])
    engines = ", ".join(
        clean(f"{client.name} {list(client.pids)} {client.state}".removesuffix(" attached"))
        for client in shot.clients
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
        ("rooms", f"{len(shot.rooms)}  {_tally(part.side for part in shot.rooms)}"),
        ("peers", f"{len(shot.peers)}  {_tally(peer.state for peer in shot.peers)}"),
        ("handoffs", handoffs),
        *([("epochs", _epochs(shot.epochs))] if shot.epochs else []),
        *([] if shot.kv_events is UNSET else [("kv events", _kv_events(shot.kv_events))]),
        ("audit", _audit_summary(shot.audit)),
        ("recorder", _recorder(shot.recorder)),
    ):
        rows.add_row(Text(name, style="bold"), Text(text.rstrip()))
    alarms = [
        Text(f"! {clean(violation.rule)}: {clean(violation.what)}: kvd audit", style="bold red")
        for violation in shot.audit.found
        if violation.state == BROKEN
    ]
    return Group(*alarms, head, Text(), pools(shot.pools), Text(), rows, *_troubles(shot))


def _kv_events(told: shown.KvEventState) -> str:
    """What routers know, by which number, and what was lost on the way."""
    lost = f"; {told.cut} cut, {told.dropped} dropped" if told.cut or told.dropped else ""
    return (
        f"{clean(told.topic)}  {told.blocks} blocks, batch {told.last_number}; "
        f"{told.subscribers} listen, {told.replays} replays, {told.snapshots} snapshots{lost}"
    )


def _recorder(recorder: shown.RecorderState) -> str:
    """Whether a recording could be saved, and how much it would hold."""
    if recorder.state == "recording":
        return (
            f"{duration(recorder.covered_s)} back, {recorder.inputs} inputs, "
            f"{amount(recorder.record_bytes)}; since {duration(recorder.since_s)}"
        )
    if recorder.state == "off":
        return f"off  {clean(recorder.why)}"
    return f"{clean(recorder.state)} {duration(recorder.since_s)} ago: {clean(recorder.why)}"


def _tally(names: Iterable[str]) -> str:
    """``decode 2, prefill 1``."""
    counts = Counter(names)
    return ", ".join(f"{clean(name)} {counts[name]}" for name in sorted(counts))


def _drain(drain: shown.DrainState) -> str:
    """Who drains this node and why, what is left, and how to end it."""
    by = f" by {clean(drain.who)}" if drain.who else ""
    why = f" ({clean(drain.why)})" if drain.why else ""
    left = f"{drain.receives} receives, {drain.sends} sends and {drain.waiting} requests under way"
    until = "" if drain.deadline_in_s is None else f", given up in {duration(drain.deadline_in_s)}"
    if drain.is_stop:
        if drain.unwritten:
            left, until = f"{drain.unwritten} cached pages to be written to tiers", ""
        return f"it stops, asked {duration(drain.since_s)} ago{why}: {left}{until}"
    now = "nothing is under way any more" if drain.is_drained else f"{left}{until}"
    return f"drained for {duration(drain.since_s)}{by}{why}: {now}; kvd undrain serves again"


def _troubles(shot: Snapshot) -> list[Text]:
    """What an operator should look at, each with the verb that says more."""
    found = [_drain(shot.drain)] if shot.drain is not None else []
    found += [f"{clean(peer.drain)}: kvd peers" for peer in shot.peers if peer.drain]
    found += [
        f"{clean(peer.name)} is {clean(peer.state)}, silent {duration(peer.silent_s)}: kvd peers"
        for peer in shot.peers
        if peer.state in {"suspect", "lost"}
    ]
    found += [clean(peer.epochs) for peer in shot.peers if peer.epochs]
    found += [
        f"bytes to {clean(peer.name)} are slow: {clean(peer.slow_path)}"
        for peer in shot.peers
        if peer.slow_path
    ]
    found += [f"copies in this node are slow: {clean(shot.slow_path)}"] if shot.slow_path else []
    found += [
        f"{clean(client.name)} of before the restart has not come back for "
        f"{duration(client.age_s)}, "
        f"{client.former_leases} leases with {client.held_pages} pages wait for it: kvd locks"
        for client in shot.clients
        if client.state == "awaited" and client.leases
    ]
    found += [
        f"kvd hung up on {clean(client.name)} and keeps {client.leases} leases with "
        f"{client.held_pages} pages until pid {', '.join(map(str, client.pids))} ends: "
        f"{clean(client.why)}"
        for client in shot.clients
        if client.state == "hung-up-on"
    ]
    found += [
        f"{clean(client.name)}: {client.leases} leases with {client.held_pages} pages are kept by "
        f"{clean(client.outlived)}"
        for client in shot.clients
        if client.outlived
    ]
    found += [f"{clean(pair.why)}: kvd why evicted" for pair in shot.evictions.thrashing]
    found += [
        f"{clean(quota.namespace)} in {clean(quota.place)}: {clean(quota.why)}: kvd why evicted"
        for quota in shot.quotas
        if quota.why
    ]
    found += [f"{clean(mark.words)}: kvd why client {mark.session}" for mark in shot.late_marks]
    if quarantined := sum(pool.quarantined_pages for pool in shot.pools):
        found.append(f"{quarantined} pages are quarantined, a remote may still write: kvd locks")
    if shot.waiting:
        longest_s = max(request.waited_s for request in shot.waiting)
        found.append(f"a request has waited {duration(longest_s)} for room: kvd locks")
    if (healed := shot.totals.violations - shot.audit.findings) > 0:
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
    for component in states:
        counts = (
            component.total_pages,
            component.free_pages,
            component.held_pages,
            component.cached_pages,
            component.locked_pages,
            component.evictable_pages,
            component.quarantined_pages,
        )
        out.row(
            f"{component.pool}/{component.component}",
            *(str(count) for count in counts),
            _sum_check(component),
            prose="\n".join(_prose(component)),
        )
    if len(states) == 1 and not states[0].companions:
        return out
    return Group(out, Text(_total_bytes(states), "dim"))


def with_quotas(out: RenderableType, quotas: Sequence[QuotaState]) -> RenderableType:
    """The same, and below it what namespaces have there beside their quotas."""
    if not quotas:
        return out
    table = TextTable("NAMESPACE", "PLACE", "PAGES>", "USED>", "FLOOR>", "CEILING>", "WENT>")
    for quota in quotas:
        most = quota.ceiling_pages
        went = quota.went_over_pages + quota.taken_pages
        table.row(
            clean(quota.namespace),
            clean(quota.place),
            str(quota.pages),
            amount(quota.pages * quota.page_bytes),
            str(quota.floor_pages or "-"),
            "-" if most is None else str(most),
            str(went or "-"),
            prose=clean(quota.why),
        )
    return Group(out, Text(), table)


def _prose(component: PoolState) -> Iterator[str]:
    """What a page is, what goes in lockstep with it, and what windows and buffers save."""
    cells = bar(
        held=component.held_pages,
        cached=component.cached_pages,
        quarantined=component.quarantined_pages,
        total=component.total_pages,
        width=32,
    )
    yield f"[{cells}] {_page_in_words(component)}"
    if component.shards:
        yield _shards(component)
    for beside in component.companions:
        yield (
            f"with {beside.component}: {counted(beside.pages_each, 'page')} of {beside.page_size} "
            f"tokens for each, {amount(beside.page_bytes)} a page{_PLACES.get(beside.tier, '')}"
        )
    if (window := component.window) is not None:
        full = window.full_pages
        of = f" ({100 * window.mapped_pages / full:.0f} %)" if full else ""
        yield (
            f"window of {window.window_tokens} tokens: {window.mapped_pages} pages mapped, "
            f"{full} with full allocation{of}; {window.slides} slides"
        )
    if (buffer := component.buffer) is not None:
        wanted = buffer.hits + buffer.misses
        of = f" ({100 * buffer.hits / wanted:.1f} % were there)" if wanted else ""
        yield (
            f"at most {buffer.request_tokens} tokens of a request; {buffer.hits} hits, "
            f"{buffer.misses} misses{of}, {amount(buffer.copied_bytes)} copied"
        )
    if component.promised_pages:
        there = component.free_pages + component.evictable_pages
        promised = component.promised_pages
        yield f"{promised} of {there} free and evictable pages are promised to leases"
    if component.saved_capacity_pages and component.page_bytes:
        kept = amount(component.saved_pages * _whole_bytes(component))
        yield (
            f"saved area: {component.saved_pages} of {component.saved_capacity_pages} pages hold "
            f"{kept} of retracted leases"
        )


def _page_in_words(component: PoolState) -> str:
    """What a page is and where; where pages are only counted, that they hold nothing."""
    if component.page_bytes:
        what = "one state" if component.extent == "per-request" else f"{component.page_size} tokens"
        interior = "" if component.interior == "nhd" else f", {component.interior} inside"
        tag = f", packed by {component.tag}" if component.tag else ""
        place = _PLACES.get(component.tier, "")
        return f"{what}, {amount(component.page_bytes)} a page{place}{interior}{tag}"
    tokens = (
        f"{(component.total_pages - 1) * component.page_size} tokens are counted, no byte is held"
    )
    if not component.placeholder_bytes:
        return tokens
    return f"{tokens}; a placeholder of one page has {amount(component.placeholder_bytes)}"


def _shards(component: PoolState) -> str:
    """Of which layers and heads of the model the shards are, and what a page takes in each."""
    n_shards, first = len(component.shards), component.shards[0]
    heads = list(dict.fromkeys((shard.first_head, shard.end_head) for shard in component.shards))
    spans = " | ".join(span("head", *each) for each in heads)
    copies = f", {n_shards // len(heads)} of each" if n_shards > len(heads) else ""
    layers = span("layer", first.first_layer, first.end_layer)
    each = amount(component.page_bytes // n_shards)
    return f"{counted(n_shards, 'shard')} of {each} a page: {layers} of {spans}{copies}"


def _total_bytes(states: tuple[PoolState, ...]) -> str:
    """All components in bytes; a companion's go with the pages that they belong to."""
    bytes_each = [_whole_bytes(component) for component in states]
    sums = {
        "": [component.total_pages for component in states],
        " free": [component.free_pages for component in states],
        " held": [component.held_pages for component in states],
        " cached": [component.cached_pages for component in states],
        " quarantined": [component.quarantined_pages for component in states],
    }
    parts = [
        f"{amount(sum(map(int.__mul__, pages, bytes_each)))}{name}" for name, pages in sums.items()
    ]
    names = [
        name
        for component in states
        for name in (component.component, *(c.component for c in component.companions))
    ]
    return f"total of {clean(', '.join(names))}: {parts[0]}; {', '.join(parts[1:])}"


def _whole_bytes(component: PoolState) -> int:
    """Of a page and of what is in lockstep with it."""
    return component.page_bytes + sum(
        each.pages_each * each.page_bytes for each in component.companions
    )


def _sum_check(component: PoolState) -> Text:
    """Whether null, free, held, cached and quarantined pages make the total."""
    found = (
        1
        + component.free_pages
        + component.held_pages
        + component.cached_pages
        + component.quarantined_pages
    )
    found += component.condemned_pages
    if found == component.total_pages:
        if component.condemned_pages:
            return Text(f"ok, {component.condemned_pages} condemned", style="yellow")
        return Text("ok", style="green")
    return Text(f"WRONG: {found} of {component.total_pages}; kvd audit", style="bold red")


# ---- leases and the queue ------------------------------------------------------------------------


def leases(states: tuple[shown.LeaseState, ...]) -> RenderableType:
    """Who holds what, why, since when."""
    out = TextTable(
        "LEASE>", "STATE", "OWNER", "REASON", "ROOM", "PREFIX>", "HELD>", "QUAR>", "AGE>"
    )
    for lease in states:
        facts = [f"held by {', '.join(lease.holders)}"] if lease.holders else []
        facts += [f"namespace {lease.namespace}"] if lease.namespace else []
        # Pages of further components: its own, and those in its row that it shares.
        beside = ", ".join(_held(has) for has in lease.beside if has.mapped_pages)
        facts += [f"beside {beside}"] if beside else []
        facts += [_saved(lease)] if lease.saved_pages or lease.retracted_s else []
        facts += [f"waits for {lease.waiting_for}"] if lease.waiting_for else []
        out.row(
            str(lease.id),
            state(lease.state),
            f"{lease.owner}[{lease.pid}]",
            lease.reason,
            room(lease.room),
            f"{lease.prefix_tokens}/{lease.prompt_tokens}",
            str(lease.held_pages),
            str(lease.quarantined_pages),
            duration(lease.age_s),
            prose="; ".join(facts),
        )
    return out if states else nothing("leases")


def _held(has: shown.HeldState) -> str:
    nodes = ", ".join(str(node) for node in has.needed_nodes)
    locks = f", locks it at node {nodes}" if nodes else ""
    return f"{has.component} {has.held_pages} ({has.mapped_pages} in its row{locks})"


def _saved(lease: shown.LeaseState) -> str:
    """Since when it is retracted, and how much of it is saved."""
    since = f"retracted {duration(lease.retracted_s)} ago, " if lease.retracted_s else ""
    return f"{since}{lease.saved_pages} pages ({amount(lease.saved_bytes)}) saved"


def waiting(states: tuple[shown.WaitingState, ...]) -> RenderableType:
    """The admission queue, in the order in which it is served."""
    out = TextTable("WAITING", "OWNER", "ROOM", "PRIORITY>", "WAITED>", "ENDS IN>", "PAGES>")
    for request in states:
        out.row(
            request.kind,
            request.owner,
            room(request.room),
            str(request.priority),
            duration(request.waited_s),
            duration(request.deadline_in_s),
            str(request.needed_pages),
            prose="; ".join([request.why, *(f"held by {who}" for who in request.held_by)]),
        )
    return out if states else nothing("requests waiting for room")


# ---- rooms and peers -----------------------------------------------------------------------------


def rooms(states: tuple[shown.RoomState, ...]) -> RenderableType:
    """Handoffs on this side: state, progress, and what each waits for."""
    out = TextTable("ROOM", "SIDE", "STATE", "PEER", "PREFIX>", "PAGES>", "AGE>", "ENDS IN>")
    for part in states:
        facts = [f"part {part.part} of {part.owner}" if part.owner else f"part {part.part}"]
        facts += [part.share] if part.share else []
        facts.append(f"{amount(part.moved_bytes)} of {amount(part.total_bytes)}")
        facts += [f"waits for {part.waiting_for}"] if part.waiting_for else []
        out.row(
            room(part.room),
            part.side,
            state(part.state),
            part.peer,
            f"{part.decode_prefix_len}/{part.prompt_tokens}",
            progress(part),
            duration(part.age_s),
            duration(part.deadline_in_s),
            prose="; ".join(facts),
        )
    return out if states else nothing("rooms")


def stories(states: tuple[shown.RoomState, ...]) -> RenderableType:
    """The last transitions of each room, oldest first."""
    lines: list[Text] = []
    for part in states:
        head = f"\nroom {part.room} {clean(part.side)} part {part.part}, handoff {part.handoff}, "
        tail = f"lease {part.lease}, {part.outstanding_posts} posts outstanding"
        lines.append(Text(head + tail, style="bold"))
        lines += [said(f"  {step}") for step in part.story]
    return Group(*lines)


def peers(states: tuple[shown.PeerState, ...]) -> RenderableType:
    """Other daemons: link, sending agent, and how long they have been silent."""
    out = TextTable("PEER", "STATE", "SILENT>", "RTT>", "RECEIVES>", "SENDS>", "AGENT")
    for peer in states:
        life = f"incarnation {short(peer.incarnation)}, generation {peer.generation}"
        path = f"bytes to it: {peer.path}" if peer.path else ""
        slow = f"slow: {peer.slow_path}" if peer.slow_path else ""
        told = [path, slow, peer.drain, peer.trouble]
        lines = [f"{peer.address}, {life}", f"layout {peer.layout}", *filter(None, told)]
        out.row(
            peer.name,
            state(peer.state),
            duration(peer.silent_s),
            f"{peer.round_trip_ms:.2f} ms",
            str(peer.open_receives),
            str(peer.open_sends),
            peer.agent,
            prose="\n".join(lines),
        )
    return out if states else nothing("peers: name them in peers.connect")


# ---- tree, why, reports --------------------------------------------------------------------------


def tree(answer: Tree) -> RenderableType:
    """Nodes indented below their parents."""
    beside = list(
        dict.fromkeys(component.component for node in answer.nodes for component in node.beside)
    )
    headings = [clean(name).upper() for name in beside]
    out = TextTable("NODE", "TOKENS", "PAGES>", "HITS>", "LOCKS>", *headings, "BEGINS WITH")
    depths: dict[int, int] = {}
    for node in answer.nodes:
        depth = depths.get(node.parent, -1) + 1
        depths[node.id] = depth
        there = {component.component: component for component in node.beside}
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


def _lies(component: Beside | None) -> str:
    """What lies at a node of one component, and how many leases need it."""
    if component is None:
        return "-"
    if not component.pages:
        return "tombstone"
    return (
        f"{component.pages}, locks {component.locks}" if component.locks else str(component.pages)
    )


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
                f"{amount(end.moved_bytes)} of {amount(end.total_bytes)} moved, "
                f"{end.outstanding_posts} posts under way, "
                f"{end.deadline_in_s:.1f} s to its deadline"
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
        for finding in state.found:
            lines += _finding(finding)
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


def _finding(finding: shown.Finding) -> list[Text]:
    style = "bold red" if finding.state == BROKEN else "yellow"
    about = [
        *([f"lease {finding.lease}"] if finding.lease else []),
        *([f"node {finding.node}"] if finding.node else []),
        *([f"{finding.owner}[{finding.pid}]"] if finding.owner else []),
        *([f"room {finding.room}"] if finding.room else []),
        *([_pages(finding)] if finding.pages else []),
        f"first seen {duration(finding.first_seen_ago_s)} ago",
        f"last {duration(finding.last_seen_ago_s)} ago",
    ]
    return [
        Text(f"{clean(finding.state)}: {clean(finding.rule)}: {clean(finding.what)}", style=style),
        Text(f"    {clean(', '.join(about))}"),
        *([Text(f"    done: {clean(finding.done)}")] if finding.done else []),
        *(Text(f"    {clean(line)}", "dim") for line in finding.transitions),
    ]


def _pages(finding: shown.Finding) -> str:
    more = ["..."] if finding.pages > len(finding.first_pages) else []
    some = " ".join([*map(str, finding.first_pages), *more])
    return f"{finding.pages} pages{f' of {finding.component}' if finding.component else ''}: {some}"
