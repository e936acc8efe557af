"""A small load of ``tests.proxy.load``: all its parts hold, and nothing is left of them."""

from __future__ import annotations

from tests.proxy import load


async def test_a_small_load_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(load, "EVENTS", 5)
    monkeypatch.setattr(load, "GAP_S", 0.02)
    limits = ("head_s=1", "prefill_s=1", "first_byte_s=1", "idle_s=1", "doubted_s=0.001")
    monkeypatch.setattr(load, "LIMITS", limits)
    faults = ("dies", "lies in its body", "hangs behind its head", "is busy")
    monkeypatch.setattr(load, "FAULTS", faults)
    found = await load.run(streams=60, vanish=10, halves=40, of_each=4)
    assert found["failures"] == []
    assert found["streams"]["whole"] == 60
