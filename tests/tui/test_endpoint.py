"""Where a console finds its daemon."""

from __future__ import annotations

import pytest

from tui.endpoint import REMOTE_SOCKET, BadEndpoint, Local, Remote, read
from tui.tunnel import arguments


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("ipc:///run/kvd/admin.sock", Local("ipc:///run/kvd/admin.sock")),
        ("ipc://@kvd", Local("ipc://@kvd")),
        ("ssh://node-7", Remote("", "node-7", 0, REMOTE_SOCKET)),
        ("ssh://node-7/", Remote("", "node-7", 0, REMOTE_SOCKET)),
        ("ssh://op@node-7/tmp/a.sock", Remote("op", "node-7", 0, "/tmp/a.sock")),
        ("ssh://op@10.0.0.7:2222", Remote("op", "10.0.0.7", 2222, REMOTE_SOCKET)),
        ("ssh://[fe80::1]:22/x", Remote("", "fe80::1", 22, "/x")),
    ],
)
def test_an_endpoint_is_here_or_behind_ssh(text, place):
    assert read(text) == place


@pytest.mark.parametrize(
    "text",
    [
        *("", "ipc://", "tcp://10.0.0.7:1", "ssh://", "ssh:///x", "ssh://a b", "/run/kvd.sock"),
        *("ssh://-oProxyCommand=x", "ssh://-x@host", "ssh://host/a:b", "ssh://host/a\nb"),
        "ssh://höst",
    ],
)
def test_what_is_neither_is_a_flaw_that_says_what_to_write(text):
    flaw = read(text)

    assert isinstance(flaw, BadEndpoint)
    assert "write ipc:///run/kvd/admin.sock" in flaw.why


def test_ssh_asks_nothing_and_forwards_only_the_socket():
    assert arguments(Remote("op", "node-7", 2222, "/run/kvd/admin.sock"), "/tmp/x/admin.sock") == [
        "ssh",
        "-N",
        *("-o", "ExitOnForwardFailure=yes"),
        *("-o", "BatchMode=yes"),
        *("-o", "ConnectTimeout=10"),
        *("-o", "ServerAliveInterval=5"),
        *("-o", "ServerAliveCountMax=3"),
        *("-p", "2222"),
        *("-L", "/tmp/x/admin.sock:/run/kvd/admin.sock"),
        *("--", "op@node-7"),
    ]
