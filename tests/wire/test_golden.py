"""Every member of every union on the wire has the bytes that were written down."""

from __future__ import annotations

import json

import msgspec
import pytest

from tests.wire.golden import FILE, UNIONS, made, members, written


@pytest.mark.parametrize("union", UNIONS)
def test_every_member_has_the_bytes_that_were_written_down(union):
    kept = json.loads(FILE.read_text("utf-8"))[union]

    assert written()[union] == kept, (
        f"the {union} changed on the wire: a new member or a new last field with a default is "
        "written down with python -m tests.wire.golden; nothing else may change"
    )


@pytest.mark.parametrize("union", UNIONS)
def test_written_bytes_are_read_as_what_was_written(union):
    decode = msgspec.msgpack.Decoder(UNIONS[union]).decode
    for tag, forms in json.loads(FILE.read_text("utf-8"))[union].items():
        for form, text in forms.items():
            again = decode(bytes.fromhex(text))
            assert msgspec.msgpack.encode(again).hex() == text, f"{tag}, {form}"


def test_both_forms_of_a_member_differ_where_it_has_defaults():
    differing = [
        cls
        for union in UNIONS.values()
        for cls in members(union)
        if made(cls, is_full=True) != made(cls, is_full=False)
    ]
    assert len(differing) > 40
