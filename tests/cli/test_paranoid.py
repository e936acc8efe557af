"""``kvd serve --paranoid`` is ``audit.paranoid``, and nothing else is changed by it."""

from __future__ import annotations

from unittest import mock

import msgspec
import pytest
from click.testing import CliRunner

import kvd.daemon.serve
from kvd.cli.serve import serve_command


@pytest.mark.parametrize(("flags", "paranoid"), [([], False), (["--paranoid"], True)])
def test_serve_asks_every_rule_after_every_step_when_paranoid(flags, paranoid, monkeypatch):
    served = []
    monkeypatch.setattr("kvd.cli.serve.WorkerChild", mock.Mock)
    monkeypatch.setattr(
        kvd.daemon.serve, "main", lambda config, load, *_: served.append((config, load))
    )

    CliRunner().invoke(serve_command, [*flags, "--set", "audit.budget=0.02"])

    ((config, load),) = served
    assert (config.audit.paranoid, config.audit.budget) == (paranoid, 0.02)
    assert msgspec.structs.replace(load(), origins={}) == msgspec.structs.replace(
        config, origins={}
    )
