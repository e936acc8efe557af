"""The standing audit: sweep after sweep over the living node, a slice of one at each ``AuditTurn``.

The shell says when and how much; the core counts work, not time, so a recorded log replays. Between
two sweeps it rests, so that an idle node stays idle; while it rests, nobody notes moves of pages.

Measured on one core of a virtual machine that others kept busy, with the default budget of 1 %:

    pool pages  nodes   leases  one sweep takes    at 1 % of a core it ends after
        2,048       0        0       0.4 ms         one turn; 0.1 % of a core
        2,048      67       20       0.7 ms         one turn; 0.15 % of a core
      100,000   2,250      500         7 ms         0.6 s
      100,000   3,400    1,000        11 ms         1.1 s
    1,000,000   2,250      500        15 ms         1.5 s
    1,000,000 112,500   10,000       240 ms          26 s

A component with pages of its own beside the first costs about as much again: with 1,000 leases and
2,250 nodes in a pool of 100,000 pages a sweep takes 10 ms, 19 ms with as many window pages beside
them, and 15 ms with states. Where there is none, nothing is added.

So from about 3,000 nodes or 500,000 pages on a sweep takes longer than a second, and what it looks
for is found within two sweeps: raise ``audit.budget`` where that is too late. A slice is held to
2 ms but for the sums over the whole tree, which are made in one piece: 12 ms of 112,500 nodes.
Noting moves is not measurable in a lease cycle of 35 us.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.audit.backrefs import Backrefs
from kvd.core.audit.containment import misgiven_fault
from kvd.core.audit.findings import Findings
from kvd.core.audit.sweep import Sweep, SweepPhase
from kvd.core.inspect.page_states import pools_of
from kvd.wire.snapshot import AuditState

if TYPE_CHECKING:
    from kvd.core.audit.rules import Fault
    from kvd.core.cache.pages import Misgiven
    from kvd.core.inputs import AuditTurn, Recalled
    from kvd.core.inspect.view import NodeView

EVERY_S = 0.25
"""From the beginning of one sweep to that of the next, at least."""


@mypyc_attr(allow_interpreted_subclasses=True)
class StandingAudit:
    """Sweeps, and what they found.

    ``work_done`` is what the last turn took, in the units of ``AuditTurn.work``.
    """

    def __init__(self, node: NodeView) -> None:
        self.findings = Findings(node)
        self.work_done = 0
        self.sweeps = 0
        self.refuted = 0
        """Sweeps that suspected pages in vain; must stay 0."""
        self.spent_s = 0.0
        self._node = node
        self._sweep: Sweep | None = None
        self._look = 0
        self._next_s = float("-inf")
        self._last: Sweep | None = None
        self._ended_s = node.out.at_s
        self._took_s = 0.0
        self._share = 0.0
        self._spent_before_s = 0.0

    @property
    def is_sweeping(self) -> bool:
        """Whether a sweep has begun that is not over."""
        return self._sweep is not None

    def turn(self, got: AuditTurn) -> None:
        """Look at as much as ``got.work`` allows; tell what does not hold."""
        self.spent_s += got.spent_s
        self.work_done = 0
        sweep = self._sweep or self._begin()
        if sweep is None:
            return
        node = self._node
        # What moved since the last turn must be known before anything is judged by this one.
        sweep.learn(node)
        # New with every turn: it is exact until the node steps again.
        refs = Backrefs(node)
        while self.work_done < got.work and sweep.phase is not SweepPhase.OVER:
            self.work_done += sweep.look(node, refs, got.work - self.work_done)
        # Told behind the slice and not within it: containing a fault changes what the slice walks
        # over.
        faults, sweep.faults = sweep.faults, []
        for fault in faults:
            self.findings.saw(fault, self._look)
        if sweep.phase is SweepPhase.OVER:
            self._end(sweep)

    def looked_at_all(self, faults: list[Fault]) -> None:
        """A full check was made: a look as good as a sweep."""
        # As a look of its own: what it does not see any more has healed, as after a sweep.
        self._look += 1
        for fault in faults:
            self.findings.saw(fault, self._look)
        self.findings.looked(self._look)

    def caught(self, misgiven: list[Misgiven]) -> None:
        """Pages came back that were not out: found as it was done, before anybody got them."""
        # Emptied in place, because all pools have this one list; and first, because what is done
        # about one may give back more.
        found, misgiven[:] = list(misgiven), []
        for given in found:
            self.findings.saw(misgiven_fault(self._node.leases, given), self._look)

    def recalled(self, got: Recalled) -> None:
        """The shell has searched its memory for a finding."""
        self.findings.recalled(got.finding, got.lines)

    def state(self) -> AuditState:
        """For the snapshot."""
        return AuditState(
            findings=self.findings.broken,
            sweeps=self.sweeps,
            sweep_s=self._took_s,
            last_sweep_ago_s=self._node.out.at_s - self._ended_s,
            objects=self._last.objects if self._last is not None else 0,
            pages=sum(places.pool.total_pages for places in pools_of(self._node.leases)),
            spent_s=self.spent_s,
            share=self._share,
            found=self.findings.states(),
        )

    @property
    def violations(self) -> int:
        """Told since the incarnation began; must stay 0."""
        return self.findings.violations

    @property
    def due_s(self) -> float:
        """When it looks on; in the past while it is in the middle of a sweep."""
        return float("-inf") if self.is_sweeping else self._next_s

    def why_condemned(self, component: str, page: int) -> str:
        """Why nobody gets this page, as far as it is still known."""
        return self.findings.containment.why(component, page)

    def _begin(self) -> Sweep | None:
        """A new sweep, when it is time for one."""
        at_s = self._node.out.at_s
        if at_s < self._next_s:
            return None
        self._next_s = at_s + EVERY_S
        self._look += 1
        for places in pools_of(self._node.leases):
            places.pool.moved.watch()  # before the first look: a move in between would go unseen
        self._sweep = Sweep(self._node, at_s)
        return self._sweep

    def _end(self, sweep: Sweep) -> None:
        node = self._node
        for places in pools_of(node.leases):
            # A log that nobody drains would only be kept full.
            places.pool.moved.ignore()
        self.findings.looked(self._look)
        at_s = node.out.at_s
        self._share = (self.spent_s - self._spent_before_s) / max(at_s - self._ended_s, 1e-3)
        self._spent_before_s = self.spent_s
        self._took_s = at_s - sweep.began_s
        self._ended_s = at_s
        self.sweeps += 1
        self.refuted += sweep.was_refuted
        self._last, self._sweep = sweep, None
