"""What is counted: plain integers that events and requests add to, read when someone scrapes.

Theory of operation. ``take`` is given every event, as the log is; ``rpc``, ``rpc_failed`` and
``loop_lag`` are called by the loop itself, because a request is no event. Each family is declared
once, with its name on the page, what it is and its labels. Nothing here formats or imports
prometheus_client: that is ``exposition``, which also reads the daemon's state; what can be read off
that is not counted a second time.

Invariant: label values are few. A value that could not be the name of a node becomes ``other``, and
so does whatever comes after ``MAX_SERIES`` different ones, so that no peer and no bug can make the
number of series grow without bound.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.wire import events

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_SERIES = 64
"""Label sets per family; reasons, causes, operations and codes are each far fewer."""
FIRST = "kv"
"""What the first component of every pool is called; events leave it out."""
MAX_PARTS = 65_536
"""Parts whose last transition is remembered, should an end never be told."""

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}")
"""What the configuration allows as a name; reasons, codes, operations and ``cuda:0`` are too."""

Labels = tuple[str, ...]

FAST_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 10.0)
"""Bounds for requests and for the lag of the loop."""
SLOW_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Bounds for handoffs and their stages."""
TOKENS = (0, 16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 1048576)

STAGES = {
    ("decode", "queued"): "wait",
    ("decode", "offered"): "offer",
    ("decode", "receiving"): "transfer",
    ("decode", "verifying"): "verify",
    ("decode", "draining"): "drain",
    ("prefill", "await-engine"): "wait",
    ("prefill", "await-offer"): "wait",
    ("prefill", "streaming"): "transfer",
    ("prefill", "flushing"): "flush",
    ("prefill", "draining"): "drain",
    ("prefill", "settled"): "settle",
}
"""What an operator calls the time that a part of a handoff spends in a state."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Counter:
    """Totals by label values. Only grows; the series ``always`` are there from the beginning."""

    __slots__ = ("doc", "labels", "name", "values")

    def __init__(
        self, name: str, doc: str, labels: Labels = (), *, always: tuple[Labels, ...] = ()
    ) -> None:
        self.name, self.doc, self.labels = name, doc, labels
        self.values: dict[Labels, int] = dict.fromkeys(always, 0)

    def add(self, amount: int, *labels: str) -> None:
        """Add to one series, or to ``other`` when there are too many."""
        values = self.values
        if labels not in values:
            labels = _bounded(labels, values)
            values.setdefault(labels, 0)
        values[labels] += amount


@mypyc_attr(allow_interpreted_subclasses=True)
class Histogram:
    """Observations by fixed bounds: ``counts[i]`` is of values in ``(bound i-1, bound i]``."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total: float = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@mypyc_attr(allow_interpreted_subclasses=True)
class Histograms:
    """Histograms with the same bounds, by label values; one without labels is there at once."""

    __slots__ = ("bounds", "doc", "labels", "name", "values")

    def __init__(
        self, name: str, doc: str, labels: Labels = (), *, bounds: tuple[float, ...]
    ) -> None:
        self.name, self.doc, self.labels = name, doc, labels
        self.bounds = bounds
        self.values: dict[Labels, Histogram] = {} if labels else {(): Histogram(bounds)}

    def of(self, *labels: str) -> Histogram:
        """The histogram of one series, or of ``other`` when there are too many."""
        found = self.values.get(labels)
        if found is None:
            labels = _bounded(labels, self.values)
            found = self.values.setdefault(labels, Histogram(self.bounds))
        return found


def _bounded(labels: Labels, known: Mapping[Labels, object]) -> Labels:
    """New label values, made few."""
    clean = tuple(label if not label or _LABEL.fullmatch(label) else "other" for label in labels)
    if len(known) >= MAX_SERIES and clean not in known:
        return ("other",) * len(labels)
    return clean


@mypyc_attr(allow_interpreted_subclasses=True)
class _Stay:
    """When a part moved first and last."""

    __slots__ = ("first_s", "last_s")

    def __init__(self, at_s: float) -> None:
        self.first_s = at_s
        self.last_s = at_s


@mypyc_attr(allow_interpreted_subclasses=True)
class _HandoffFamilies:
    """What is counted of handoffs."""

    def __init__(self) -> None:
        ways, directions = ("role", "outcome", "reason"), (("received",), ("sent",))
        self.handoffs = Counter("kvd_handoffs", "Handoffs that ended on this node.", ways)
        self.handoff_bytes = Counter(
            "kvd_handoff_bytes", "KV bytes that handoffs moved.", ("dir",), always=directions
        )
        self.handoff_bytes_saved = Counter(
            "kvd_handoff_bytes_saved",
            "KV bytes that handoffs need not move, because the decode side had them.",
            ("dir",),
            always=directions,
        )
        self.decode_prefix_tokens = Histograms(
            "kvd_decode_prefix_tokens",
            "Tokens of a received prompt that were cached here already.",
            bounds=TOKENS,
        )
        self.handoff_seconds = Histograms(
            "kvd_handoff_seconds", "From the first request to the end.", ("role",), bounds=SLOW_S
        )
        self.stage_seconds = Histograms(
            "kvd_handoff_stage_seconds",
            "Time a part of a handoff spent in one stage.",
            ("role", "stage"),
            bounds=SLOW_S,
        )


@mypyc_attr(allow_interpreted_subclasses=True)
class _CopyFamilies(_HandoffFamilies):
    """And of what engines copy themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.engine_copies = Counter(
            "kvd_engine_copies",
            "Copies of engines between pages and blocks of their own.",
            ("way", "device", "outcome"),
        )
        self.engine_copy_bytes = Counter(
            "kvd_engine_copy_bytes", "What they moved.", ("way", "device")
        )
        self.engine_copy_seconds = Histograms(
            "kvd_engine_copy_seconds",
            "How long each waited for its mark, waited in all until bytes moved, and moved.",
            ("way", "device", "stage"),
            bounds=FAST_S,
        )


@mypyc_attr(allow_interpreted_subclasses=True)
class Metrics(_CopyFamilies):
    """Everything that is counted on this node. ``pool`` labels what its events say of pages."""

    def __init__(self, pool: str) -> None:
        super().__init__()
        where = ("pool", "component", "reason")
        self.evicted_pages = Counter("kvd_evicted_pages", "Cached pages that gave way.", where)
        self.leases_released = Counter("kvd_leases_released", "Leases that ended.", ("cause",))
        self.leases_retracted = Counter(
            "kvd_leases_retracted",
            "Running leases that gave their pages back, by what was kept of them.",
            ("kept",),
            always=(("host",), ("nothing",)),
        )
        self.retraction_bytes = Counter(
            "kvd_retraction_bytes",
            "KV bytes of retracted leases: saved, restored, and spared because the tree had them.",
            ("what",),
            always=(("saved",), ("restored",), ("spared",)),
        )
        self.violations = Counter(
            "kvd_ledger_violations", "Invariants found broken; must stay 0.", always=((),)
        )
        self.corrupt_pages = Counter(
            "kvd_corrupt_pages",
            "Received pages that were not what was sent; none of them was cached.",
            ("peer",),
        )
        self.peers_lost = Counter("kvd_peers_lost", "Peers given up as lost.", ("peer",))
        self.handshakes_failed = Counter(
            "kvd_peer_handshakes_failed",
            "Connections with peers that ended before the first message.",
            ("reason",),
        )
        self.rpc_seconds = Histograms(
            "kvd_rpc_seconds", "From request to answer.", ("op",), bounds=FAST_S
        )
        self.rpc_errors = Counter("kvd_rpc_errors", "Requests refused.", ("op", "code"))
        self.messages_refused = Counter(
            "kvd_messages_refused", "Messages that could not be acted on.", ("socket", "code")
        )
        self.loop_lag_seconds = Histograms(
            "kvd_loop_lag_seconds", "How late timers of the event loop fire.", bounds=FAST_S
        )
        self._stays: dict[tuple[str, int], _Stay] = {}
        # Looked up rather than matched: a miss costs 0.1 us instead of 1, three times a lease.
        self._takers: dict[type, Callable[..., None]] = {
            events.Moved: self._moved,
            events.HandoffEnded: self._handoff_ended,
            events.Evicted: lambda event: self.evicted_pages.add(
                event.pages, pool, event.component or FIRST, event.reason
            ),
            events.LeaseReleased: lambda event: self.leases_released.add(1, event.cause),
            events.LeaseRetracted: self._retracted,
            events.LeaseResumed: self._resumed,
            events.EngineCopied: self._engine_copied,
            events.MessageRefused: lambda event: self.messages_refused.add(
                1, event.socket, event.code
            ),
            events.PeerLost: lambda event: self.peers_lost.add(1, event.peer),
            events.PagesCorrupt: lambda event: self.corrupt_pages.add(event.bad_pages, event.peer),
            events.Violation: lambda _event: self.violations.add(1),
        }

    def families(self) -> list[Counter | Histograms]:
        """Everything that is counted, in the order of the page."""
        # Named one by one: what is compiled has no ``__dict__`` to find them in.
        return [
            self.handoffs,
            self.handoff_bytes,
            self.handoff_bytes_saved,
            self.decode_prefix_tokens,
            self.handoff_seconds,
            self.stage_seconds,
            self.evicted_pages,
            self.leases_released,
            self.leases_retracted,
            self.retraction_bytes,
            self.engine_copies,
            self.engine_copy_bytes,
            self.engine_copy_seconds,
            self.violations,
            self.corrupt_pages,
            self.peers_lost,
            self.handshakes_failed,
            self.rpc_seconds,
            self.rpc_errors,
            self.messages_refused,
            self.loop_lag_seconds,
        ]

    def counts(self, kind: type[events.Event]) -> bool:
        """Whether events of this kind are counted."""
        return kind in self._takers

    def take(self, event: events.Event) -> None:
        """Count one event, in order; of a kind that is not counted: nothing."""
        taker = self._takers.get(type(event))
        if taker is not None:
            taker(event)

    def rpc(self, op: str, seconds: float) -> None:
        """Count one answered request. On the hot path: about 0.3 us."""
        found = self.rpc_seconds.values.get((op,))
        if found is None:
            found = self.rpc_seconds.of(op)
        # Not ``FAST_S``: compiled, a constant tuple of floats would be made anew at each call.
        found.counts[bisect_left(found.bounds, seconds)] += 1
        found.total += seconds

    def rpc_failed(self, op: str, code: str) -> None:
        """Count one refused request by the code of its refusal."""
        self.rpc_errors.add(1, op, code)

    def http_refused(self, status: int) -> None:
        """Count one refused HTTP request; it is no event, for anybody who probes may make many."""
        self.messages_refused.add(1, "http", str(status))

    def handshake_failed(self, reason: str) -> None:
        """Count one connection with a peer that ended before its first message.

        Not taken from events, which are told only now and then.
        """
        self.handshakes_failed.add(1, reason)

    def loop_lag(self, seconds: float) -> None:
        """Count how late a timer of the event loop fired."""
        self.loop_lag_seconds.of().observe(seconds)

    def _moved(self, event: events.Moved) -> None:
        part = (event.side, event.part)
        stay = self._stays.get(part)
        if stay is None:
            if event.after in {"closed", "forgotten"}:
                return
            if len(self._stays) >= MAX_PARTS:
                del self._stays[next(iter(self._stays))]
            self._stays[part] = _Stay(event.at_s)
            return
        stage = STAGES.get((event.side, event.before))
        if stage is not None:
            self.stage_seconds.of(event.side, stage).observe(event.at_s - stay.last_s)
        stay.last_s = event.at_s
        if event.after == "forgotten":
            del self._stays[part]

    def _handoff_ended(self, event: events.HandoffEnded) -> None:
        """Count the end, and the time until the part first moved: its wait."""
        stay = self._stays.pop((event.side, event.part), None)
        if stay is not None:
            waited_s = stay.first_s - (event.at_s - event.took_s)
            self.stage_seconds.of(event.side, "wait").observe(max(0.0, waited_s))
        direction = "received" if event.side == "decode" else "sent"
        self.handoffs.add(1, event.side, event.outcome, event.code)
        self.handoff_bytes.add(event.moved_bytes, direction)
        self.handoff_bytes_saved.add(event.saved_bytes, direction)
        self.handoff_seconds.of(event.side).observe(event.took_s)
        if event.side == "decode":
            self.decode_prefix_tokens.of().observe(event.decode_prefix_len)

    def _engine_copied(self, event: events.EngineCopied) -> None:
        way, device = event.way, event.device or "cpu"
        self.engine_copies.add(1, way, device, "failed" if event.why else "done")
        self.engine_copy_bytes.add(event.n_bytes, way, device)
        seconds = self.engine_copy_seconds
        seconds.of(way, device, "mark").observe(event.mark_us / 1e6)
        seconds.of(way, device, "wait").observe(event.waited_us / 1e6)
        seconds.of(way, device, "move").observe(event.moved_us / 1e6)

    def _retracted(self, event: events.LeaseRetracted) -> None:
        self.leases_retracted.add(1, "host" if event.saved_pages else "nothing")
        self.retraction_bytes.add(event.saved_bytes, "saved")

    def _resumed(self, event: events.LeaseResumed) -> None:
        self.retraction_bytes.add(event.restored_bytes, "restored")
        self.retraction_bytes.add(event.spared_bytes, "spared")
