"""What the pages name exists: links, paths, modules, commands, words of the glossary."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.docs.commands import FENCE, command_lines, fault, ours, without_fences

PATH = re.compile(r"(?<![\w/.:@-])(?:kvd|tui|tests|docs|systemd|benchmarks)/[\w./*-]*[\w*/]")
INVENTED = {"kvd/families/sparse.py"}
"""Files that a page has its reader write."""
MODULE = re.compile(r"python -m ((?:kvd|tui|tests|benchmarks)[\w.]*)")
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
TERM = re.compile(r"\{term\}`([^`]+)`")


def slug(heading):
    """The anchor of a heading, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_readme_is_short(pages):
    assert len(pages["README.md"].splitlines()) <= 150
    assert len(pages["README.md"].split()) <= 1000


def test_no_paragraph_of_a_page_begins_as_another_one_does(pages):
    """As after two changes of one that were both kept."""
    wrong = []
    for name, text in pages.items():
        begins = [line.strip()[:70] for line in without_fences(text).splitlines()]
        twice = {begin for begin in begins if len(begin) == 70 and begins.count(begin) > 1}
        wrong += [f"{name}: {begin}..." for begin in sorted(twice) if not begin.startswith("|")]
    assert not wrong, "\n".join(wrong)


def test_relative_links_lead_somewhere(root, pages):
    wrong = []
    for name, text in pages.items():
        for target in LINK.findall(without_fences(text)):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, anchor = target.partition("#")
            place = (root / name).parent / file if file else root / name
            if not place.exists():
                wrong.append(f"{name}: {target} is not there")
            elif anchor:
                headings = re.findall(r"^#+ (.*)$", place.read_text("utf-8"), flags=re.M)
                if anchor not in map(slug, headings):
                    wrong.append(f"{name}: {target} has no such heading")
    assert not wrong, "\n".join(wrong)


def test_paths_that_are_named_exist(root, pages):
    wrong = [
        f"{name}: {path} is not there"
        for name, text in pages.items()
        for path in PATH.findall(text)
        if path not in INVENTED and not list(root.glob(path.rstrip("/")))
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_that_are_run_exist(pages):
    wrong = [
        f"{name}: python -m {module} is not there"
        for name, text in pages.items()
        for module in MODULE.findall(text)
        if importlib.util.find_spec(module) is None
    ]
    assert not wrong, "\n".join(wrong)


def test_commands_parse(pages):
    wrong = []
    found = 0
    for name, text in pages.items():
        for line in command_lines(text):
            if (called := ours(line)) is not None:
                found += 1
                why = fault(*called)
                wrong += [f"{name}: {line}: {why}"] if why else []
    assert found > 50
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "line", ["kvd flsh", "kvd status --nope", "kvd pools swa", "kvd-tui --fast", "kvd bench x"]
)
def test_command_that_does_not_exist_is_found(line):
    assert fault(*ours(line))


def test_targets_of_make_exist(root, pages):
    targets = set(re.findall(r"^([\w-]+):", (root / "Makefile").read_text("utf-8"), flags=re.M))
    named = {
        words[1]
        for text in pages.values()
        for line in command_lines(text)
        if len(words := line.split()) > 1 and words[0] == "make"
    }
    assert named
    assert named <= targets


def test_words_of_the_glossary_are_defined_once(pages):
    fences = FENCE.findall(pages["docs/glossary.md"])
    body = next(body for _, kind, body in fences if kind == "{glossary}")
    words = re.findall(r"^(\S.*)$", body, flags=re.M)
    assert len(words) == len(set(words))
    assert 35 <= len(words) <= 75
    assert words == sorted(words, key=str.lower)
    twice = re.findall(r"^(\S.*)\n  .*\n  ", body, flags=re.M)
    assert not twice


def test_words_that_refer_to_the_glossary_are_there(pages):
    body = pages["docs/glossary.md"]
    wrong = [
        f"{name}: {term}"
        for name, text in pages.items()
        for term in TERM.findall(text)
        if not re.search(rf"^{re.escape(term)}$", body, flags=re.M | re.I)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_page_is_in_the_contents(root, pages):
    listed = set()
    for _, kind, body in FENCE.findall(pages["docs/index.md"]):
        if kind == "{toctree}":
            listed |= {line for line in body.splitlines() if line and line[0] != ":"}
    there = {name[5:-3] for name in pages if name.startswith("docs/")} - {"index"}
    assert there == listed
    assert (root / "docs" / "conf.py").exists()


def test_the_build_is_strict_and_a_part_of_the_check(root):
    text = (root / "Makefile").read_text("utf-8")
    recipe = re.search(r"^docs:.*\n((?:\t.*\n)+)", text, flags=re.M)[1]
    assert {"-W", "--keep-going", "-n"} <= set(recipe.split())
    check = re.search(r"^check:(.*)$", text, flags=re.M)[1].split()
    assert {"docs", "man"} <= set(check)


def test_every_row_of_the_map_has_a_path(pages):
    """Who reads the page on its own has nothing but that to open."""
    page = pages["docs/contributing.md"].partition("## Where do I find")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?!what \||-)(.*?) \| (.*) \|$", page, flags=re.M)
    wrong = [what for what, where in rows if not re.search(r"`(kvd|tui|tests|systemd)[/`]", where)]
    assert len(rows) > 25
    assert not wrong


def test_tests_that_the_table_of_scenarios_names_exist(root):
    tests = root / "tests"
    named = re.findall(r"`((?:\w+/)+[\w*]+)`", (tests / "SCENARIOS.md").read_text("utf-8"))
    named = [name for name in named if (tests / name.partition("/")[0]).is_dir()]
    wrong = [name for name in named if not any(tests.glob(f"{name.rstrip('*')}*"))]
    assert len(named) > 100
    assert not wrong, f"{wrong} are not there"


def test_what_the_changelog_denies_is_not_there(root, pages):
    denied = pages["CHANGELOG.md"].partition("### Not there")[2].lower()
    connectors = [path.parent.name for path in root.glob("kvd/connectors/*/__init__.py")]
    assert connectors
    assert not [name for name in connectors if re.search(rf"connector for [^.]*\b{name}\b", denied)]
