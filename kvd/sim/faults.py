"""What goes wrong with hosts and links while a simulation is stormy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.wire import admin

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.sim.host import SimHost
    from kvd.sim.world import World


QUIET_FAULTS = 0.005
"""How often something goes wrong while no request arrives, over how often it does in a burst."""


class Faults:
    """Draws a fault now and then, and does it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rng
        self.done = 0
        self._kinds: dict[str, Callable[[SimHost], None]] = {
            "engine": self._engine,
            "daemon": self._daemon,
            "transfer": lambda host: host.restart_transfer("it crashed"),
            "suspend": self._suspend,
            "partition": self._partition,
            "isolate": self._isolate,
            "reconnect": self._reconnect,
            "fence": lambda host: self._ask(host, admin.Fence(1)),
            "evict": lambda host: self._ask(host, admin.Evict(1, self._rng.randint(1, 10))),
            "flush": lambda host: self._ask(host, admin.Flush(1)),
            "flush-one": self._flush_one,
            "pin": self._pin,
            "unpin": self._unpin,
            "abort": self._abort,
            "agent": self._agent,
            "worker": self._worker,
            "deaf": self._deaf,
            "stop": self._stop,
            "epoch": self._epoch,
            "storage": lambda host: host.restart_storage("it crashed"),
            "damage": lambda host: host.damage(self._rng.randrange(1000)),
        }

    def schedule(self) -> None:
        """The next fault, if this kind of weather has any."""
        world, rate = self._world, self._world.profile.faults_per_s
        if not rate:
            return
        wait_s = self._rng.expovariate(rate)
        left_s = world.quiet_until_s - world.agenda.now_s
        if left_s > 0.0:
            # As often as in a burst once that is over; before it, now and then.
            wait_s = min(wait_s / QUIET_FAULTS, left_s + wait_s)
        world.agenda.after(wait_s, self._strike)

    def _strike(self) -> None:
        world = self._world
        if not world.is_stormy:
            return
        host = self._rng.choice(world.hosts)
        if host.is_up:
            self.done += 1
            self._kinds[self._rng.choice(world.profile.faults)](host)
        self.schedule()

    def _a_while_s(self) -> float:
        return 0.1 + self._world.profile.longest_trouble_s * self._rng.random() ** 2

    # ---- hosts -------------------------------------------------------------------------------

    def _engine(self, host: SimHost) -> None:
        if self._is_awake(host):
            host.hang_up()
            host.attach()

    def _worker(self, host: SimHost) -> None:
        if self._is_awake(host):
            host.lose_worker()

    def _deaf(self, host: SimHost) -> None:
        if self._is_awake(host):
            host.hang_up_on()

    def _daemon(self, host: SimHost) -> None:
        host.crash()
        self._world.agenda.after(self._a_while_s(), self._world.start, host)

    def _stop(self, host: SimHost) -> None:
        if self._is_awake(host):
            host.ask_to_stop()

    def _suspend(self, host: SimHost) -> None:
        host.asleep_until_s = max(host.asleep_until_s, self._world.agenda.now_s + self._a_while_s())

    def _agent(self, _: SimHost) -> None:
        self._world.failing_loads = 0.9
        self._world.agenda.after(1.0, self._agents_work)

    def _agents_work(self) -> None:
        world = self._world
        world.failing_loads = world.profile.failing_loads if world.is_stormy else 0.0

    # ---- links -------------------------------------------------------------------------------

    def _partition(self, host: SimHost) -> None:
        world = self._world
        other = self._rng.choice(world.hosts)
        if other is not host:
            self._cut(host, other, both_ways=self._rng.random() < 0.7)

    def _isolate(self, host: SimHost) -> None:
        for other in self._world.hosts:
            if other is not host:
                self._cut(host, other, both_ways=True)

    def _cut(self, host: SimHost, other: SimHost, *, both_ways: bool) -> None:
        world = self._world
        world.network.cut(host.name, other.name, both_ways=both_ways)
        world.agenda.after(self._a_while_s(), world.network.mend, host.name, other.name)

    def _reconnect(self, host: SimHost) -> None:
        if host.dials:
            self._world.network.connect(host, self._rng.choice(host.dials))

    # ---- operators ---------------------------------------------------------------------------

    def _pin(self, host: SimHost) -> None:
        edges = list(host.node.leases.tree.nodes())
        if edges:
            edge, ttl_s = self._rng.choice(edges), self._rng.expovariate(0.2) + 0.1
            asked = admin.Pin(call=1, kind="node", id=edge.id, ttl_s=ttl_s, who="simulated")
            self._ask(host, asked)

    def _flush_one(self, host: SimHost) -> None:
        """A namespace is flushed, perhaps while no storage process serves; often the end is near.

        So what lies below was not removed yet, and the next daemon must know of the flush.
        """
        rng = self._rng
        if rng.random() < 0.5:
            host.restart_storage("it crashed")
        flush = admin.Flush(1, namespace=rng.choice((None, "", "lora")))
        self._world.agenda.after(0.1 * rng.random(), self._ask, host, flush)
        if rng.random() < 0.7:
            self._world.agenda.after(0.1 + 0.2 * rng.random(), self._die_at_once, host, host.life)

    def _die_at_once(self, host: SimHost, life: int) -> None:
        if host.is_up and host.life == life:
            self._daemon(host)

    def _unpin(self, host: SimHost) -> None:
        pins = list(host.node.pins.by_id)
        if pins:
            self._ask(host, admin.Unpin(1, self._rng.choice(pins)))

    def _epoch(self, _: SimHost) -> None:
        """A base has new weights: every node is told, each in its own time."""
        world = self._world
        base = self._rng.choice(("", "lora"))
        epoch = world.epochs[base] = world.epochs.get(base, 0) + 1
        for host in world.hosts:
            world.agenda.after(2.0 * self._rng.random(), host.epochs.raise_epoch, base, epoch)

    def _abort(self, host: SimHost) -> None:
        room = self._world.a_recent_room()
        self._ask(host, admin.AskOtherEnd(1, room))
        self._ask(host, admin.AbortRoom(1, room, "simulated"))

    def _ask(self, host: SimHost, request: admin.AdminRequest) -> None:
        if host.is_up and self._is_awake(host):
            host.ask(request)

    def _is_awake(self, host: SimHost) -> bool:
        return host.asleep_until_s <= self._world.agenda.now_s
