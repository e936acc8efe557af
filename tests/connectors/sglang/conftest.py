"""How long anything takes is the machine's: no wait for a daemon ends before its answer.

And what engines that hand over stand on: SGLang's process, and the daemons of two nodes.
"""

from __future__ import annotations

import tempfile

import pytest

from kvd.connectors import daemon_link
from kvd.connectors.sglang import page_store, storage_link
from tests.connectors.sglang.pd_pair import MHA_BYTES, SGLang, nodes_for

PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr("kvd.client.port.AT_ONCE_S", PATIENCE_S)
    monkeypatch.setattr(daemon_link, "OPEN_WITHIN_S", PATIENCE_S)
    for module in (daemon_link, storage_link):
        monkeypatch.setattr(module, "AGAIN_WITHIN_S", PATIENCE_S)
    monkeypatch.setattr(page_store, "COPY_WITHIN_S", PATIENCE_S)


@pytest.fixture(scope="module")
def sglang():
    with tempfile.TemporaryDirectory(prefix="kvd-pd-") as directory:
        found = SGLang(directory)
        yield found
        found.close()


@pytest.fixture(scope="module")
def nodes():
    with nodes_for(MHA_BYTES) as found:
        yield found


@pytest.fixture
def running(nodes):
    """What a test before this one has left."""
    for daemon in (nodes.prefill, nodes.decode):
        if not daemon.is_running:
            daemon.start()
            daemon.wait_ready()
