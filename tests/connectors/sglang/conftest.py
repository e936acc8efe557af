"""How long anything takes is the machine's: no wait for a daemon ends before its answer."""

from __future__ import annotations

import pytest

from kvd.connectors import daemon_link
from kvd.connectors.sglang import page_store, storage_link

PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr("kvd.client.port.AT_ONCE_S", PATIENCE_S)
    monkeypatch.setattr(daemon_link, "OPEN_WITHIN_S", PATIENCE_S)
    for module in (daemon_link, storage_link):
        monkeypatch.setattr(module, "AGAIN_WITHIN_S", PATIENCE_S)
    monkeypatch.setattr(page_store, "COPY_WITHIN_S", PATIENCE_S)
