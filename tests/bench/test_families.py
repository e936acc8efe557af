"""``benchmarks families``: its closed forms, what it says, and one family on real daemons."""

from __future__ import annotations

import msgspec
import pytest
from click.testing import CliRunner

from benchmarks.families import ComponentSeen, FamilySeen, disagreements, measure, result_of
from benchmarks.family_forms import (
    DEVICE,
    GROUPS,
    HISPARSE,
    HOST,
    HYBRID,
    INDEXED,
    MHA,
    MIB,
    MLA,
    PREFILL_ONLY,
    QUANTISED,
    RECURRENT,
    SWA,
    FamilyWorkload,
    families_of,
    tail_pages,
    window_pages,
)
from benchmarks.harness import BenchmarkFile, benchmark
from kvd.bench.report import show
from kvd.config.load import load
from kvd.config.pool import pool_spec
from kvd.config.schema import Config
from kvd.core.layout.spec import Buffer, Device, page_bytes

WORK = FamilyWorkload()
FAMILIES = families_of(WORK)


def test_a_window_of_1024_takes_66_pages_of_16_while_it_decodes_and_193_in_chunks_of_2048():
    # 64 pages of window and one of 16 tokens, or 128 of them; and one because it slides unaligned.
    assert window_pages(1024, 16, 16) == 66
    assert window_pages(1024, 2048, 16) == 193


@pytest.mark.parametrize(
    ("prompt", "window", "pages"),
    [
        (32_768, 1024, 65),  # from token 31,743, which is in page 1,983, to page 2,048
        (1040, 1000, 63),  # from token 39 in page 2: the window is no multiple of the page
        (1041, 1024, 65),  # from token 16, where page 1 begins
        (1040, 1024, 65),  # from token 15: page 0
        (100, 1024, 7),  # all of a prompt shorter than the window
        (100, 4, 2),  # a window shorter than a page looks back a whole one: from token 83
    ],
)
def test_a_tail_begins_on_the_page_of_the_token_one_window_before_the_last(prompt, window, pages):
    assert tail_pages(prompt, window, 16) == pages


def test_the_forms_of_the_whole_table_are_these():
    found = {
        name: (
            [one.held_pages for one in family.parts],
            round(family.held_bytes(DEVICE) / MIB, 2),
            round(family.held_bytes(HOST) / MIB, 2),
            round(family.sent_bytes / MIB, 2),
            family.admitted(WORK),
        )
        for name, family in FAMILIES.items()
    }

    # 32,768 + 256 tokens in pages of 16; K and V of a layer take 64 bytes a token.
    assert found == {
        MHA: ([2064], 12.09, 0, 12.0, 13),
        QUANTISED: ([2064, 2064], 7.56, 0, 7.5, 21),
        SWA: ([2064, 66], 2.34, 0, 2.32, 68),
        MLA: ([2064], 36.28, 0, 36.0, 4),
        INDEXED: ([2064, 2064], 40.31, 0, 40.0, 3),
        HISPARSE: ([2064, 2064, 128], 6.28, 36.28, 40.0, 14),
        HYBRID: ([2064, 1], 10.12, 0, 10.1, 15),
        RECURRENT: ([33_024, 1], 8.1, 0, 8.1, 18),
        PREFILL_ONLY: ([2064], 0, 0, 0, 13),
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_the_settings_of_a_family_make_the_pool_that_its_forms_are_of(name):
    family = FAMILIES[name]
    sets = [f"{key}={value}" for key, value in family.settings.items()]

    config = load(None, {}, sets)
    assert isinstance(config, Config), config
    spec = pool_spec(config)

    counted = [0] if family.counted_page_bytes else [page_bytes(one) for one in spec.components]
    assert [one.name for one in spec.components] == [one.name for one in family.parts]
    assert counted == [one.page_bytes for one in family.parts]
    on_device = sum(
        page_bytes(one) * pages
        for one, pages in zip(spec.components, spec.pages, strict=True)
        if isinstance(one.tier, Device) or isinstance(one.extent, Buffer)
    )
    assert on_device <= WORK.device_mib * MIB


def test_every_family_is_in_one_group():
    assert sorted(name for group in GROUPS for name in group) == sorted(FAMILIES)


def seen_as_expected(name: str, **changed: float) -> FamilySeen:
    """What is measured when everything is as the forms say, but for what is ``changed``."""
    family = FAMILIES[name]
    return FamilySeen(
        parts=tuple(
            ComponentSeen(one.name, one.tier, one.page_bytes, 0, one.held_pages)
            for one in family.parts
        ),
        figures=family.figures(WORK) | changed,
        short_of="kv",
        times_s=(0.010, 0.020, 0.030),
    )


def apart(name: str, **changed: float) -> list[str]:
    return disagreements(FAMILIES[name], seen_as_expected(name, **changed), WORK)


@pytest.mark.parametrize(
    ("what", "measured"),
    [
        ("requests admitted", 67),
        ("bytes sent", 1.02 * FAMILIES[SWA].sent_bytes),
        ("bytes received", 0),
        ("bytes of a placeholder", 1),
        ("pages still held at the end", 1),
        ("broken invariants", 1),
        ("pages of swa by the daemon's count", 69 * 66),
        ("window pages of a prefill", 2048),
        ("the same, computed at once", 193),
    ],
)
def test_a_measurement_more_than_one_percent_off_is_a_disagreement(what, measured):
    form = FAMILIES[SWA].figures(WORK)[what]

    found = apart(SWA, **{what: measured})

    assert found == [f"swa: {what}: measured {measured:g}, closed form {form:g}"]


def test_a_fetch_that_copies_a_page_twice_is_a_disagreement():
    twice = {"hits of a second": 126, "bytes copied by both": 130 * 18_432}

    assert apart(HISPARSE, **twice) == [
        "hisparse: hits of a second: measured 126, closed form 128",
        f"hisparse: bytes copied by both: measured {130 * 18_432:g}, closed form {128 * 18_432:g}",
    ]


def test_a_page_too_many_of_a_window_is_a_disagreement():
    held = {"pages of swa held": 67, "bytes of swa held": 67 * 5120}

    assert sorted(apart(SWA, **held)) == [
        f"swa: bytes of swa held: measured {67 * 5120:g}, closed form {66 * 5120:g}",
        "swa: pages of swa held: measured 67, closed form 66",
    ]


def test_one_percent_is_no_disagreement():
    assert apart(SWA, **{"bytes sent": FAMILIES[SWA].sent_bytes * 101 // 100}) == []


def test_the_table_has_each_figure_beside_its_form(capsys):
    found = result_of([(FAMILIES[SWA], seen_as_expected(SWA))], WORK)

    show(found)

    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[2:5] == [
        "swa 2064 kv + 66 swa 2064+66 2.34 2.34 2.32 2.32 68 68 kv 20.0 29.8",
        "swa, prefill, chunks 2048 kv + 193 swa 2048+193 2.94 2.94 - - - - - - -",
        "swa, prefill, at once 2048 kv + 2048 swa 2048+2048 12.00 12.00 - - - - - - -",
    ]


def test_the_command_fails_where_a_figure_is_not_as_its_form_says(tmp_path):
    file = tmp_path / "result.json"
    seen = seen_as_expected(SWA, **{"requests admitted": 13})
    command = benchmark("families", lambda _: result_of([(FAMILIES[SWA], seen)], WORK))

    ran = CliRunner().invoke(command, ["--json", str(file)])

    assert ran.exit_code == 1
    assert ran.stderr.endswith(
        "what was measured is not what arithmetic says\n"
        "swa: requests admitted: measured 13, closed form 68\n"
    )
    assert "swa" in ran.stdout
    written = msgspec.json.decode(file.read_bytes(), type=BenchmarkFile)
    assert (written.name, written.found.tables[0].rows[0]["admitted"]) == ("families", 13)


def test_two_daemons_with_windows_hold_send_and_admit_what_the_forms_say():
    """Scenarios C, at their smallest: 512 tokens, a window of 64."""
    work = FamilyWorkload(
        prompt_tokens=512,
        answer_tokens=64,
        window_tokens=64,
        chunk_tokens=128,
        device_mib=2,
        repeats=1,
    )

    ((family, seen),) = measure(work, [SWA], lambda _: None)

    assert disagreements(family, seen, work) == []
    assert result_of([(family, seen)], work).wrong == ()
    assert [one.held_pages for one in seen.parts] == [36, 6]
    assert (seen.figures["requests admitted"], len(seen.times_s), seen.short_of) == (30, 1, "swa")
    windows = [
        seen.figures["window pages of a prefill"],
        seen.figures["the same, computed at once"],
    ]
    assert windows == [13, 32]
    assert seen.figures.keys() == family.figures(work).keys()
