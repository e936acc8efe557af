from __future__ import annotations

import tomllib

from hypothesis import given
from hypothesis import strategies as st

from kvd.config.keys import KEYS, nearest
from kvd.config.sources import line_numbers


def test_line_numbers_finds_tables_keys_and_dotted_keys() -> None:
    text = '''# pool.pages = 1
pool.size = "1MiB"

[ peers ]
  allow = [
    "a",
    "b",
  ]
listen="x"
"quoted" = """
layers = 3
"""
[peers."con.nect"]
'p' . q = { a = 1 }
[log] # level
level = 'x' # format = 1
'''
    tomllib.loads(text)

    assert line_numbers(text) == {
        ("pool",): 2,
        ("pool", "size"): 2,
        ("peers",): 4,
        ("peers", "allow"): 5,
        ("peers", "listen"): 9,
        ("peers", "quoted"): 10,
        ("peers", "con.nect"): 13,
        ("peers", "con.nect", "p"): 14,
        ("peers", "con.nect", "p", "q"): 14,
        ("log",): 15,
        ("log", "level"): 16,
    }


@given(st.text())
def test_line_numbers_survives_any_text(text: str) -> None:
    line_numbers(text)


def test_nearest_knows_typos_and_wrong_sections() -> None:
    assert nearest("pool.pagesize") == "pool.page_size"
    assert nearest("pools.layers") == "pool.layers"
    assert nearest("node.listen") == "peers.listen"
    assert nearest("peers.page_size") == "pool.page_size"
    assert nearest("zzz.qqq") is None


def test_every_key_has_a_line_of_documentation_and_a_rule() -> None:
    for key in KEYS.values():
        assert key.doc.endswith("."), key.path
        assert key.rule, key.path
        assert (
            key.default is not None
            or key.example is not None
            or key.section
            in {
                "node",
                "sockets",
            }
        ), key.path
