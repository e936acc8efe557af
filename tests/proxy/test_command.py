"""``kvd proxy`` on the command line: what is wrong is said before anything is served."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from kvd.cli.proxy import proxy_command

ENGINE = ("--decode", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--decode"),
        (("--decode", "h:81"), "no address"),
        (("--decode", "http://h:81,daemon=ipc:///x"), "give namespace=NAME"),
        (("--prefill", "http://user:hunter2@h:99999", *ENGINE), "no address"),
        ((*ENGINE, "--listen", "8000"), "no HOST:PORT"),
        ((*ENGINE, "--limit", "prefil_s=3"), "prefill_s"),
        ((*ENGINE, "--limit", "prefill_s=0"), "above 0"),
        ((*ENGINE, "--pass-path", "sleep"), "does not begin with /"),
    ],
)
def test_what_is_wrong_is_said_in_words(arguments, said):
    found = CliRunner().invoke(proxy_command, arguments)
    assert found.exit_code == 2
    assert said in found.output
    assert "hunter2" not in found.output
