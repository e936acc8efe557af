"""The pictures that the README shows: they are there, small, and can be made again."""

from __future__ import annotations

import html

import pytest

from tests.support.daemons import one_daemon
from tests.tui.pictures import MAX_BYTES, PICTURES, Picture, take

KEPT = {"overview": "overview", "pools": "pools", "handoffs": "handoffs", "compared": "since "}
"""Each, and what stands in it."""


def text_of(path):
    return html.unescape(path.read_text("utf-8")).replace("\xa0", " ")


@pytest.mark.parametrize("name", KEPT)
def test_a_picture_is_kept_of_a_node_at_work_and_is_small(name):
    path = PICTURES / f"{name}.svg"
    text = text_of(path)
    assert path.stat().st_size < MAX_BYTES
    assert KEPT[name] in text
    assert "decode-0" in text
    assert "serving" in text


def test_a_picture_is_made_of_a_daemon_by_the_console_itself(tmp_path):
    shape = {"pool.layers": "2", "pool.heads": "2", "pool.head_dim": "64", "pool.pages": "257"}
    with one_daemon(tmp_path, shape) as daemon:
        path = take(daemon, Picture("one", "pools", "page:7"), 0.2, tmp_path / "to")
    text = text_of(path)
    assert "pools" in text
    assert "page 7" in text
    assert "terminal-" not in text
