"""Reading the configuration again: what can change while the daemon runs changes, all or nothing.

An invalid configuration changes nothing. What needs a restart is named with both its values, each
time until there was one. Tables of peers take more entries; to change or to remove one is to part
with a peer that may be up, which takes a restart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from kvd.config import Config
from kvd.config.quota_rules import QUOTA_KEYS
from kvd.config.render import KeyChange, changes, with_changes
from kvd.core.inputs import Reconfigured, ReloadRefused
from kvd.daemon.settings_from_config import disk_quotas, pool_quotas, store_quotas
from kvd.wire.admin import Changed, Reloaded
from kvd.wire.codec import NO_CALL

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.config import ConfigError
    from kvd.daemon.app import Daemon

    Read = Callable[[], Config | list[ConfigError]]

LIVE: Final = frozenset(
    {
        "peers.allow",
        "admission.max_queue",
        "admission.overtakers",
        "admission.drain_s",
        *QUOTA_KEYS,
        "audit.budget",
        "console.budget",
        "log.level",
    }
)
"""Keys whose value may change."""

GROWING: Final = frozenset({"peers.connect", "peers.keys"})
"""Tables that may get another entry."""


class Reloader:
    """Reads with ``read`` and changes ``daemon``, which has been started."""

    def __init__(self, daemon: Daemon, read: Read) -> None:
        self._daemon = daemon
        self._read = read

    def reload(self, call: int = NO_CALL) -> Reloaded:
        """Do it now; the answer to ``call``."""
        daemon = self._daemon
        is_told = daemon.systemd.is_ready  # not while it starts or stops: that is what it says
        if is_told:
            daemon.systemd.reloading()
        try:
            return self._reload(call)
        finally:
            if is_told:
                daemon.systemd.ready(daemon.state())

    def _reload(self, call: int) -> Reloaded:
        daemon, reactor = self._daemon, self._daemon.reactor
        found = self._read()
        if not isinstance(found, Config):
            errors = tuple(error.sentence for error in found)
            reactor.feed(ReloadRefused(reactor.clock(), errors))
            return Reloaded(call=call, changed=(), needs_restart=(), errors=errors)
        # Against what is in force, and not against the file as it was last read.
        differences = changes(daemon.config, found)
        live = [
            difference for difference in differences if _is_live(difference, daemon.config, found)
        ]
        waiting = [difference for difference in differences if difference not in live]
        # With what has changed only: the rest differs again at the next reload, and is named again.
        daemon.config = config = with_changes(daemon.config, live)
        # The shell before the core, whose event tells everybody that it is done.
        self._apply(live)
        reactor.feed(
            Reconfigured(
                at_s=reactor.clock(),
                allow=config.peers.allow,
                max_queue=config.admission.max_queue,
                overtakers=config.admission.overtakers,
                quotas=pool_quotas(config, reactor.node.settings.spec),
                disk_quotas=disk_quotas(config, reactor.node.settings.spec),
                store_quotas=store_quotas(config, reactor.node.settings.spec),
                changed=tuple(map(_in_words, live)),
                needs_restart=tuple(map(_in_words, waiting)),
            )
        )
        return Reloaded(
            call,
            tuple(Changed(*difference.texts) for difference in live),
            tuple(Changed(*difference.texts) for difference in waiting),
        )

    def _apply(self, live: list[KeyChange]) -> None:
        """What is the shell's own; the core hears of its figures by an input."""
        daemon, config = self._daemon, self._daemon.config
        keys = {difference.key for difference in live}
        if "log.level" in keys:
            daemon.set_log_level(config.log.level)
        daemon.auditor.share = config.audit.budget
        if "console.budget" in keys:
            daemon.consoles.set_budget(config.console.budget)
        daemon.links.trust(_added(live, "peers.keys"))  # first: who is dialed must have one
        daemon.links.dial(_added(live, "peers.connect"))


def _is_live(change: KeyChange, before: Config, after: Config) -> bool:
    """Whether it needs no restart; peers are not met under another key than they are told of."""
    has_same_key = before.peers.secret_key_file == after.peers.secret_key_file
    may_grow = change.key in GROWING and change.is_addition and has_same_key
    return change.key in LIVE or may_grow


def _added(live: list[KeyChange], table: str) -> dict[str, str]:
    """New entries of a table."""
    return {
        difference.entry: cast("str", difference.after)
        for difference in live
        if difference.key == table and difference.entry is not None
    }


def _in_words(change: KeyChange) -> str:
    subject, before, after = change.texts
    return f"{subject}: {before or 'none'} -> {after or 'none'}"
