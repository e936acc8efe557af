"""Reading the configuration again: what changes, what waits, and that it is all or nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest
from click.testing import CliRunner

import kvd.client
from kvd.cli import kvd as command
from kvd.errors import KvdError
from kvd.wire import admin
from kvd.wire.admin import Changed
from kvd.wire.events import ConfigRefused, ConfigReloaded
from tests.daemon.conftest import until
from tests.daemon.kv import SHAPE
from tests.daemon.manager import Manager
from tests.support.daemons import Daemon


class Node:
    """A daemon whose configuration file can be written again."""

    def __init__(self, directory, name="node", **settings):
        self.daemon = Daemon(name, directory, {**SHAPE, **settings})
        del self.daemon._settings["log.level"]  # for the file to say
        self.daemon.config_file = self.file = directory / f"{name}.toml"
        self.write("")

    def write(self, text):
        self.file.write_text(text)

    def reload(self):
        return self.daemon.ask(admin.Reload(1), admin.Reloaded)

    def happened(self, *kinds):
        page = self.daemon.ask(admin.ListEvents(1, 0), admin.EventPage)
        return [one for one in page.events if isinstance(one, kinds)]

    def log(self):
        return self.daemon._log.read_text()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    node = Node(tmp_path_factory.mktemp("reload"))
    node.daemon.start()
    node.daemon.wait_ready()
    yield node
    node.daemon.stop()


@pytest.fixture
def node(served):
    """With its first configuration."""
    yield served
    served.write("")
    served.reload()
    assert served.daemon.ask(admin.Audit(1), admin.Report).refused == ()


def test_nothing_new_changes_nothing(node):
    assert node.reload() == admin.Reloaded(1, (), ())


def test_what_can_change_changes_and_what_cannot_is_named_with_both_values(node):
    node.write('[audit]\nbudget = 0.02\n[admission]\nmax_queue = 7\n[radix]\npolicy = "lfu"\n')

    first, second = node.reload(), node.reload()

    waits = (Changed("radix.policy", '"lru"', '"lfu"'),)
    changed = (
        Changed("admission.max_queue", "1024", "7"),
        Changed("audit.budget", "0.01", "0.02"),
    )
    assert first == admin.Reloaded(1, changed, waits)
    assert second == admin.Reloaded(1, (), waits)  # until there was a restart
    told = node.happened(ConfigReloaded)[-2]
    assert told.changed == ("admission.max_queue: 1024 -> 7", "audit.budget: 0.01 -> 0.02")
    assert told.needs_restart == ('radix.policy: "lru" -> "lfu"',)


def test_quotas_come_change_and_go(node):
    def held():
        return [
            (row.namespace, row.floor_pages, row.ceiling_pages)
            for row in node.daemon.snapshot().quotas
        ]

    node.write('[quotas.pool.floor]\nllama = "320KiB"\n')
    assert node.reload().changed == (Changed("quotas.pool.floor.llama", "", '"320KiB"'),)
    assert held() == [("llama", 10, None), ("(all others)", 0, None)]
    node.write('[quotas.pool.ceiling]\nllama = "640KiB"\n')
    assert len(node.reload().changed) == 2
    assert held() == [("llama", 0, 20), ("(all others)", 0, None)]
    node.write('[quotas.pool.floor]\nllama = "320GiB"\n')
    assert "and the other floors are" in node.reload().errors[0]
    node.write("")
    assert node.reload().changed == (Changed("quotas.pool.ceiling.llama", '"640KiB"', ""),)
    assert held() == []


def test_invalid_configuration_changes_nothing_and_is_said(node):
    node.write("[audit]\nbudget = 0.02\n[admission]\nmax_queue = 0\n")

    refused = node.reload()

    assert (refused.changed, refused.needs_restart) == ((), ())
    assert len(refused.errors) == 1
    assert "admission.max_queue = 0" in refused.errors[0]
    assert node.happened(ConfigRefused)[-1].errors == refused.errors
    node.write("")
    assert node.reload() == admin.Reloaded(1, (), ())


def test_log_level_holds_from_the_next_event_on(node):
    told = len(node.happened(ConfigReloaded))
    until(lambda: node.log().count('"event":"config-reloaded"') == told)  # lines may be 20 ms late
    node.write('[log]\nlevel = "error"\n')
    node.reload()
    quiet = node.log()
    node.daemon.ask(admin.Flush(1), admin.Report)
    assert node.log() == quiet
    node.write('[log]\nlevel = "info"\n')

    node.reload()

    until(lambda: '"event":"config-reloaded"' in node.log()[len(quiet) :])
    node.daemon.ask(admin.Flush(1), admin.Report)
    until(lambda: '"event":"flushed"' in node.log()[len(quiet) :])


async def test_queue_is_as_long_as_it_says_now(node):
    async with kvd.client.connect(node.daemon.client, name="engine") as engine:
        all_of_it = await engine.lease([1] * 16 * 256)
        node.write("[admission]\nmax_queue = 1\n")
        node.reload()
        waiting = asyncio.ensure_future(engine.lease([2] * 16, deadline_s=20.0))
        await asyncio.to_thread(until, lambda: node.daemon.snapshot().waiting)
        with pytest.raises(KvdError, match="the limit is 1"):
            await engine.lease([3] * 16, deadline_s=20.0)
        await all_of_it.release()
        await (await waiting).release()


def test_hang_up_reloads_and_systemd_is_told(tmp_path, monkeypatch):
    with Manager.at(tmp_path) as manager:
        monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
        one = Node(tmp_path)
        one.daemon.start()
        try:
            manager.expect("READY")
            one.write("[audit]\nbudget = 0.02\n")
            os.kill(one.daemon.pid, signal.SIGHUP)

            reloading = manager.expect("RELOADING").lines
            ready = manager.expect("READY").lines
            assert one.happened(ConfigReloaded)[0].changed == ("audit.budget: 0.01 -> 0.02",)
        finally:
            one.daemon.stop()

    assert reloading.pop("MONOTONIC_USEC").isdecimal()
    assert reloading == {"RELOADING": "1", "STATUS": "reloading"}
    assert ready == {"READY": "1", "STATUS": "serving"}


def test_peer_that_is_added_is_met_with_its_key(tmp_path):
    old, new = Node(tmp_path, "old"), Node(tmp_path, "new")
    public = {one: one.daemon.make_keys() for one in (old, new)}
    new.daemon.trusts("old", public[old])
    old.daemon.trusts("old", public[old])
    try:
        for one in (old, new):
            one.daemon.start()
        for one in (old, new):
            one.daemon.wait_ready()
        old.write(
            f"[peers.connect]\nnew = '{new.daemon.peers}'\n[peers.keys]\nnew = '{public[new]}'\n"
        )

        reloaded = old.reload()

        assert {one.key for one in reloaded.changed} == {"peers.connect.new", "peers.keys.new"}
        assert reloaded.needs_restart == ()
        until(lambda: [(p.name, p.state) for p in old.daemon.snapshot().peers] == [("new", "up")])
        old.write("")
        gone = old.reload()
        assert gone.changed == ()
        assert {one.key for one in gone.needs_restart} == {"peers.connect.new", "peers.keys.new"}
    finally:
        for one in (old, new):
            one.daemon.stop()


def kvd_reload(node, *words):
    arguments = ["reload", "--connect", node.daemon.admin, *words]
    return CliRunner().invoke(command, arguments)


def test_command_says_what_changed_and_what_waits(node):
    node.write('[audit]\nbudget = 0.02\n[radix]\npolicy = "lfu"\n')

    done = kvd_reload(node)

    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "changed:",
        "  audit.budget: 0.01 -> 0.02",
        "needs a restart, and is still as before:",
        '  radix.policy: "lru" -> "lfu"',
    ]


def test_command_ends_with_1_on_an_invalid_configuration(node):
    node.write("[audit]\nbudget = 2\n")

    done = kvd_reload(node)

    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr.startswith("Error: nothing was changed: one error in the configuration\n")
    assert "audit.budget = 2" in done.stderr


def test_command_prints_json(node):
    node.write('[radix]\npolicy = "lfu"\n')

    done = kvd_reload(node, "--format", "json")

    assert done.exit_code == 0
    assert json.loads(done.stdout) == {
        "changed": [],
        "needs_restart": [{"key": "radix.policy", "before": '"lru"', "after": '"lfu"'}],
        "errors": [],
    }
