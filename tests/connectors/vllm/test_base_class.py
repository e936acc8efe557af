"""The connector's hooks beside those of vLLM's base class, of each version as its text has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvd.connectors.vllm.versions import TESTED
from tests.connectors.vllm.played_vllm import connector_module
from tests.engines.base_class import differences, hooks, key, record, recorded

BY_SERIES = recorded()
NEWEST = max(BY_SERIES, key=key)
OURS = Path(__file__).parents[3] / "kvd" / "connectors" / "vllm" / "connector.py"


def of(found, *classes):
    """Of these classes, each method as ``name(arguments)``."""
    told = (hook.rpartition("@")[2].partition(" ")[2] if "@" in hook else hook for hook in found)
    split = (hook.split(".", 1) for hook in told)
    return {method for owner, method in split if owner in classes}


def asked(found):
    return of(found, "KVConnectorBase_V1", "SupportsHMA")


def names(methods):
    return {method.partition("(")[0] for method in methods}


def test_every_version_that_is_taken_is_recorded_and_the_newest():
    assert {f"{major}.{minor}" for major, minor in TESTED} <= set(BY_SERIES)
    assert key(NEWEST) > TESTED[-1]


def test_every_hook_that_is_answered_is_asked_by_some_version_with_these_arguments():
    """A name that vLLM does not call would be answered to nobody."""
    known = set().union(*map(asked, BY_SERIES.values()))
    ours = of(hooks(OURS.read_text()), "KvdConnector")
    assert {method for method in ours if not method.startswith("_")} - known == set()


@pytest.mark.parametrize("series", sorted(BY_SERIES, key=key))
def test_every_hook_that_must_be_answered_is(series):
    must = asked({hook for hook in BY_SERIES[series] if "@abstractmethod" in hook})
    assert must
    assert must <= of(hooks(OURS.read_text()), "KvdConnector")


def test_what_a_new_version_adds_is_named():
    text = OURS.read_text().replace("class KvdConnector(", "class KVConnectorBase_V1(")
    before = set(differences(text))
    told = f"adds to {NEWEST}, the newest that is recorded: "
    hook = "def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata)"
    assert hook in text

    text = text.replace(hook, "def handle_preemptions(self, ids: set[str])")
    text += "\nclass SupportsTea:\n    @property\n    def wants_tea(self) -> bool: ...\n"

    assert set(differences(text)) - before == {
        f"{told}KVConnectorBase_V1.handle_preemptions(self, ids)",
        f"{told}@property SupportsTea.wants_tea(self)",
        f"{told}KVConnectorBase_V1.handle_preemptions(self, kv_connector_metadata)".replace(
            "adds to", "lacks of"
        ),
    }


def test_a_record_of_what_comes_and_goes():
    def text(*names):
        return "class A:\n    x = 0\n" + "".join(f"    def {name}(self): ...\n" for name in names)

    made = record({"0.9": text("a", "b"), "0.10": text("a", "c"), "0.11": text("a", "c")})
    assert made["series"] == ["0.9", "0.10", "0.11"]
    assert made["hooks"] == {
        "A.a(self)": "0.9 to 0.11",
        "A.b(self)": "0.9 to 0.9",
        "A.c(self)": "0.10 to 0.11",
    }
    with pytest.raises(ValueError, match=r"A\.b\(self\) is in"):
        record({"0.9": text("b"), "0.10": text(), "0.11": text("b")})


def test_the_played_base_class_has_no_more_than_the_newest(monkeypatch):
    with connector_module(monkeypatch) as module:
        played = {name for name in vars(module.KVConnectorBase_V1) if not name.startswith("__")}
    assert played <= names(asked(BY_SERIES[NEWEST]))
