"""A small load of ``tests.proxy.load``: all its parts hold, and nothing is left of them."""

from __future__ import annotations

from tests.proxy import load


async def test_a_small_load_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(load, "EVENTS", 5)
    monkeypatch.setattr(load, "GAP_S", 0.02)
    limits = ("head_s=1", "prefill_s=0.5", "first_byte_s=0.5", "idle_s=0.5", "health_s=0.5")
    monkeypatch.setattr(load, "LIMITS", limits)
    found = await load.run(streams=60, vanish=10, halves=40, of_each=2)
    assert found["failures"] == []
    assert found["streams"]["whole"] == 60
