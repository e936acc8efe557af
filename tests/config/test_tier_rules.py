"""What a tier on disk cannot be combined with, and what it must have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvd.config import Config, load
from kvd.config.render import as_tables, effective
from tests.config.pools import HOST, POOLS, findings

if TYPE_CHECKING:
    from pathlib import Path

TIER = ("tiers.disk.directory=/var/lib/kvd/tiers/disk", "tiers.disk.size=1GiB")


def breaches(*sets: str) -> list[tuple[str, str]]:
    """What is held against these settings: keys and rules."""
    return [(key, rule) for key, rule, _ in findings(*sets)]


def test_a_directory_and_a_size_make_a_tier() -> None:
    assert breaches(*TIER) == []


def test_a_rate_that_brings_in_time_what_is_under_way_is_taken() -> None:
    assert breaches(*TIER, "tiers.disk.max_rate=52MiB") == []
    assert breaches(*TIER, "tiers.disk.max_rate=1MiB", "tiers.disk.max_moving=4MiB") == []


@pytest.mark.parametrize("family", ["mla", "raw"])
def test_families_of_whole_pages_have_tiers(family: str) -> None:
    assert breaches(*TIER, "pool.size=8GiB", *POOLS[family]) == []


@pytest.mark.parametrize("family", ["swa", "hisparse", "recurrent"])
def test_other_families_are_refused_with_their_reason(family: str) -> None:
    ((key, rule),) = breaches(*TIER, "pool.size=8GiB", *POOLS[family])

    assert key == "tiers.disk.directory"
    assert rule.startswith(f"is refused with pool.family = {family}: ")
    assert rule.endswith("; only mha, mla and raw have tiers")


@pytest.mark.parametrize(
    ("sets", "key", "rule"),
    [
        (TIER[:1], "tiers.disk.directory", "needs tiers.disk.size"),
        (TIER[1:], "tiers.disk.size", "says nothing without tiers.disk.directory"),
        ((*TIER, "tiers.disk.max_moving=1GiB"), "tiers.disk.size", "must be at least twice"),
        ((*TIER, "tiers.disk.max_moving=1KiB"), "tiers.disk.max_moving", "must hold one page"),
        ((*TIER, "tiers.disk.max_rate=20MiB"), "tiers.disk.max_rate", "is too little for"),
        ((*TIER, "tiers.disk.max_rate=fast"), "tiers.disk.max_rate", "must be a whole number"),
        ((*TIER, "cache.mode=off"), "tiers.disk.directory", "is refused with cache.mode = off"),
        ((*TIER, "pool.device=cuda:0"), "tiers.disk.directory", "storage reads and writes host"),
        (("tiers.disk.directory=tier", TIER[1]), "tiers.disk.directory", "an absolute path"),
        ((TIER[0], "tiers.disk.size=much"), "tiers.disk.size", "must be a whole number and a unit"),
        ((*TIER, "tiers.disk.demote=some"), "tiers.disk.demote", "must be one of always"),
        (("tiers.tape.size=1GiB",), "tiers.tape.size", "is no key of kvd"),
    ],
)
def test_what_cannot_be_is_refused_at_its_key(sets: tuple[str, ...], key: str, rule: str) -> None:
    found = breaches(*sets)

    assert [(one, True) for one, _ in found] == [(key, True)]
    assert rule in found[0][1]


def test_the_section_is_read_from_a_file_an_environment_and_written_again(tmp_path: Path) -> None:
    file = tmp_path / "kvd.toml"
    file.write_text('[tiers.disk]\ndirectory = "/t"\nwait_s = 7\n')
    environment = {"KVD_TIERS__DISK__SIZE": "4GiB"}
    first = load(file, environment, (), host=HOST)
    assert isinstance(first, Config)
    file.write_text(effective(first))
    second = load(file, {}, (), host=HOST)
    assert isinstance(second, Config)

    assert (first.tiers_disk.size, first.tiers_disk.wait_s) == ("4GiB", 7.0)
    assert first.origins["tiers.disk.wait_s"].place == f"{file}:3"
    assert as_tables(second)["tiers.disk"] == as_tables(first)["tiers.disk"]


def test_a_wrong_key_of_the_section_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "kvd.toml"
    file.write_text('[tiers.disk]\ndirectry = "/t"\n')

    (error,) = load(file, {}, (), host=HOST)

    assert error.key == "tiers.disk.directry"
    assert error.where.endswith(":2")
    assert "tiers.disk.directory" in error.fix
