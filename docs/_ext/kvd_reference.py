"""The reference pages, read off the code while they are built: nothing generated is kept.

A page says, in a fence of its own, which part it wants, and gets Markdown made of the code::

    ```{kvd} metrics
    ```

``PARTS`` at the end names every part. All that is imported of the project is imported here at the
top, so a module that moves is mended in one place. What is drawn is in ``kvd_drawing``.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import json
import pkgutil
import re
import textwrap
import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click
import msgspec
from docutils import nodes
from docutils.statemachine import StringList
from kvd_drawing import drawing
from sphinx.util.docutils import SphinxDirective, SphinxRole
from textual.keys import format_key
from typing_extensions import override

import kvd
import tui
from kvd import errors
from kvd.bench.report import BenchmarkResult
from kvd.cli import kvd as kvd_command
from kvd.config.keys import KEYS
from kvd.config.load import host_defaults
from kvd.config.render import EXAMPLE_HOST, toml_value
from kvd.config.schema import SECTIONS
from kvd.core.handoff.protocol import DECODE, PREFILL, DecodeTrigger, PrefillTrigger
from kvd.observe.exposition import Build, Exposition
from kvd.observe.metrics import Metrics
from kvd.wire import admin, attach, client, events, peer, snapshot
from tui.app import KvdTui
from tui.cli import main as console_command
from tui.screens import ALL as CONSOLE_PAGES
from tui.screens.page import Page

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from sphinx.application import Sphinx

Struct: TypeAlias = type[msgspec.Struct]
Cells: TypeAlias = "Sequence[str]"

ROOT = Path(__file__).resolve().parents[2]
STORIES = ROOT / "tests" / "stories"
BENCHMARKS = ROOT / "docs" / "benchmarks"

MACHINES: dict[str, tuple[dict[Any, Any], type[enum.Enum], str]] = {
    "decode": (DECODE, DecodeTrigger, "queued"),
    "prefill": (PREFILL, PrefillTrigger, "await-engine"),
}
UNIONS: dict[str, tuple[types.ModuleType, object]] = {
    "attach": (attach, attach.AttachRequest | attach.AttachReply),
    "client-requests": (client, client.Request),
    "client-replies": (client, client.Reply),
    "peer": (peer, peer.Message),
    "admin-requests": (admin, admin.AdminRequest),
    "admin-replies": (admin, admin.AdminReply),
}
MAPPED = "kvd kvd.core kvd.wire kvd.families kvd.transfer kvd.storage kvd.daemon kvd.pools"
MAPPED += " kvd.journal kvd.recorder kvd.observe kvd.console kvd.client kvd.config kvd.cli"
MAPPED += " kvd.device kvd.zmtp kvd.sim kvd.demo kvd.bench kvd.harness benchmarks tui"


class Unknown(Exception):
    """A page asks for what is not there; said as an error of the build."""


# ---- text ----------------------------------------------------------------------------------------


def prose(text: str) -> str:
    """A docstring as Markdown: what is code stays code, signs that mean something are quoted."""
    pieces = re.split(r"(``[^`]+``|`[^`]+`)", inspect.cleandoc(text))
    for at in range(0, len(pieces), 2):
        pieces[at] = re.sub(r"([*<\[\]|])", r"\\\1", pieces[at])
    return "".join(pieces)


def cell(text: str) -> str:
    """Text for one cell of a table: one line, and no sign that would end the cell."""
    return " ".join(re.sub(r"(?<!\\)\|", r"\\|", text).split())


def table(headers: Cells, rows: Iterable[Cells]) -> Iterator[str]:
    """A table; nothing where there is no row."""
    rows = list(rows)
    if not rows:
        return
    yield f"| {' | '.join(headers)} |"
    yield f"|{'---|' * len(headers)}"
    for row in rows:
        yield f"| {' | '.join(map(cell, row))} |"
    yield ""


def code(text: object) -> str:
    """Something to be typed or read as it is."""
    return f"`{text}`" if str(text) else ""


def first_line(text: str | None) -> str:
    """What a docstring says first."""
    return inspect.cleandoc(text or "").partition("\n")[0]


# ---- structs of the wire -------------------------------------------------------------------------


def members(union: object) -> tuple[Struct, ...]:
    """The structs of a union, flat, in their order."""
    if isinstance(union, type):
        return (union,)
    return tuple(one for part in typing.get_args(union) for one in members(part))


NAMED: dict[object, str] = {None: "None", type(None): "None", Ellipsis: "..."}


def tag_of(struct: Struct) -> str:
    """The tag of a message; empty for what is inside one."""
    tag = struct.__struct_config__.tag
    return str(tag) if tag else ""


def type_name(annotation: object) -> str:
    """A type as a reader writes it: ``Annotated`` gives its bounds."""
    if annotation in NAMED:
        return NAMED[annotation]
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(args[0]) + _bounds(args[1:])
    if origin in {typing.Union, types.UnionType}:
        names = [type_name(one) for one in args]
        return " or ".join(names) if len(names) < 5 else "one of several structs"
    if origin is typing.Literal:
        return " or ".join(str(one) for one in args)
    if args:
        return f"{type_name(origin)}[{', '.join(map(type_name, args))}]"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _bounds(metas: Sequence[object]) -> str:
    """What a value may be, as far as it is short."""
    said = []
    for meta in metas:
        if not isinstance(meta, msgspec.Meta):
            continue
        if meta.ge is not None and meta.ge not in {-(2**63), -(2**31)}:
            said.append(f"at least {meta.ge:,}")
        if meta.le is not None and meta.le not in {2**63 - 1, 2**31}:
            said.append(f"at most {meta.le:,}")
        if meta.max_length is not None:
            said.append(f"at most {meta.max_length:,} long")
    return f" ({', '.join(said)})" if said else ""


def field_docs(struct: Struct) -> dict[str, str]:
    """The strings that stand below fields."""
    body = ast.parse(textwrap.dedent(inspect.getsource(struct))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            docs[field.target.id] = str(below.value.value)
    return docs


def default_of(field: msgspec.structs.FieldInfo) -> str:
    """The default as a reader writes it; empty where there is none."""
    if field.default is not msgspec.NODEFAULT:
        value = field.default
        if isinstance(value, enum.Enum):
            return code(value.value)
        if isinstance(value, msgspec.Struct):
            return code(f"{type(value).__name__}()")
        return code(json.dumps(value) if isinstance(value, str) else repr(value))
    return "" if field.default_factory is msgspec.NODEFAULT else code("{}")


def struct_rows(struct: Struct, *, skip: frozenset[str] = frozenset()) -> Iterator[Cells]:
    """One row a field: name, type, default, what it is."""
    hints = typing.get_type_hints(struct, include_extras=True)
    docs = field_docs(struct)
    for field in msgspec.structs.fields(struct):
        if field.name not in skip:
            yield (
                code(field.name),
                prose(type_name(hints[field.name])),
                default_of(field),
                prose(docs.get(field.name, "")),
            )


def struct_text(struct: Struct, depth: int, *, skip: frozenset[str] = frozenset()) -> Iterator[str]:
    """One struct: heading, docstring, fields."""
    tag = tag_of(struct)
    yield f"{'#' * depth} {code(tag) if tag else struct.__name__}"
    yield ""
    if tag:
        yield f"`{struct.__name__}`. "
    yield prose(struct.__doc__ or "")
    yield ""
    rows = list(struct_rows(struct, skip=skip))
    if rows:
        yield from table(("field", "type", "default", ""), rows)


def inside(structs: Iterable[Struct], module: types.ModuleType) -> list[Any]:
    """The structs and enums of a module that fields of others are made of, in their order."""
    told = set(structs)
    seen: dict[type, None] = {}

    def walk(annotation: object) -> None:
        if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct | enum.Enum):
            if annotation in seen or annotation in told:
                return
            seen[annotation] = None
            if issubclass(annotation, msgspec.Struct):
                for hint in typing.get_type_hints(annotation, include_extras=True).values():
                    walk(hint)
        for part in typing.get_args(annotation):
            walk(part)

    for struct in told:
        for hint in typing.get_type_hints(struct, include_extras=True).values():
            walk(hint)
    return sorted(
        (one for one in seen if one.__module__ == module.__name__),
        key=lambda one: inspect.getsourcelines(one)[1],
    )


def messages_text(name: str) -> Iterator[str]:
    """Every message of one socket, and what its fields are made of."""
    module, union = UNIONS[name]
    structs = members(union)
    for struct in structs:
        yield from struct_text(struct, 4)
    if name in {"client-replies", "admin-requests"}:
        return  # their parts are told with the others of the same module
    for one in inside(structs, module):
        if issubclass(one, enum.Enum):
            yield f"#### {one.__name__}"
            yield ""
            yield prose(one.__doc__ or "")
            yield ""
            yield f"One of {', '.join(code(each.value) for each in one)}."
            yield ""
        else:
            yield from struct_text(one, 4)


def messages_overview(name: str) -> Iterator[str]:
    """One line a message."""
    _, union = UNIONS[name]
    yield from table(
        ("tag", "struct", "what"),
        (
            (
                code(tag_of(one)),
                code(one.__name__),
                prose(first_line(one.__doc__)),
            )
            for one in members(union)
        ),
    )


STAMPS = frozenset({"seq", "at_s"})


def events_text(_: str) -> Iterator[str]:
    """Every event with its fields, but for the two that all of them have."""
    for struct in members(events.Event):
        yield from struct_text(struct, 2, skip=STAMPS)


def snapshot_text(_: str) -> Iterator[str]:
    """The whole state, as ``kvd status --format json`` prints it."""
    yield from struct_text(snapshot.Snapshot, 2)
    for one in inside([snapshot.Snapshot], snapshot):
        yield from struct_text(one, 2)


# ---- state machines ------------------------------------------------------------------------------


def states_text(name: str) -> Iterator[str]:
    """One side of a handoff: which trigger leads from which state to which."""
    rows, _, first = MACHINES[name]
    moves: dict[tuple[str, str], list[str]] = {}
    stays: dict[str, list[str]] = {}
    for (state, trigger), after in rows.items():
        if after is state:
            stays.setdefault(state.value, []).append(trigger.value)
        else:
            moves.setdefault((state.value, after.value), []).append(trigger.value)
    yield from table(
        ("from", "on", "to"),
        (
            (code(before), ", ".join(map(code, triggers)), code(after))
            for (before, after), triggers in moves.items()
        ),
    )
    yield "Nothing changes on these:"
    yield ""
    yield from table(
        ("in", "on"),
        ((code(state), ", ".join(map(code, triggers))) for state, triggers in stays.items()),
    )
    yield f"A part begins as {code(first)}. A pair that is in neither table is illegal."
    yield ""


def states_picture(name: str) -> str:
    """The drawing of one side."""
    rows, _, _ = MACHINES[name]
    states = list(dict.fromkeys(state.value for state, _ in rows))
    states += [one.value for one in dict.fromkeys(rows.values()) if one.value not in states]
    arrows: dict[tuple[str, str], list[str]] = {}
    for (state, trigger), after in rows.items():
        if after is not state:
            arrows.setdefault((state.value, after.value), []).append(trigger.value)
    return drawing(states, arrows, f"States of the {name} side and what leads on from each.")


def triggers_text(name: str) -> Iterator[str]:
    """What can happen to a part, in the words of the table."""
    _, triggers, _ = MACHINES[name]
    body = ast.parse(textwrap.dedent(inspect.getsource(triggers))).body[0]
    assert isinstance(body, ast.ClassDef)
    said: dict[str, str] = {}
    for line, below in zip(body.body, [*body.body[1:], ast.Pass()], strict=True):
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant):
            is_said = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            said[str(line.value.value)] = str(below.value.value) if is_said else ""  # type: ignore[attr-defined]
    yield from table(
        ("trigger", "what happened"), ((code(one), prose(doc)) for one, doc in said.items())
    )


# ---- the command line ----------------------------------------------------------------------------


def command_text(command: click.Command, path: str, depth: int) -> Iterator[str]:
    """One command: how it is written, what it does, its options; then its own commands."""
    # Below the command itself: it says how help is asked for.
    above = click.Context(kvd_command, help_option_names=["-h", "--help"])
    context = click.Context(command, info_name=path, parent=above)
    if depth > 1:
        yield f"{'#' * depth} {path}"
        yield ""
    yield "```text"
    yield " ".join([path, *command.collect_usage_pieces(context)])
    yield "```"
    yield ""
    yield prose(command.help or command.get_short_help_str(limit=200))
    yield ""
    options = [
        (f"`{record[0]}`", prose(record[1]))
        for parameter in command.get_params(context)
        if (record := parameter.get_help_record(context)) is not None
    ]
    for name, doc in options:
        yield name
        yield f": {cell(doc) or 'See above.'}"
        yield ""
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from command_text(found, f"{path} {name}", depth + 1)


def cli_text(_: str) -> Iterator[str]:
    """Every verb of ``kvd``."""
    yield from command_text(kvd_command, "kvd", 2)


def console_text(_: str) -> Iterator[str]:
    """The command of the console."""
    yield from command_text(console_command, "kvd-tui", 1)


def keys_text(_: str) -> Iterator[str]:
    """The keys of the console: those of all pages, of what has rows, then of each page."""
    owners = [("", KvdTui), ("what has rows", Page), *CONSOLE_PAGES.items()]
    rows = [
        (
            " ".join(code(format_key(key)) for key in binding.key.split(",")),
            f"{binding.description} {binding.tooltip}".strip(),
            where,
        )
        for where, owner in owners
        for binding in vars(owner).get("BINDINGS", ())
    ]
    yield from table(("key", "what it does", "where"), rows)


# ---- configuration -------------------------------------------------------------------------------


def configuration_text(_: str) -> Iterator[str]:
    """Every section and key of the configuration file."""
    defaults = {key.path: key.default for key in KEYS.values()} | host_defaults(EXAMPLE_HOST)
    for section, struct in SECTIONS.items():
        yield f"## \\[{section}\\]"
        yield ""
        yield prose(struct.__doc__ or "")
        yield ""
        for key in KEYS.values():
            if key.section == section:
                yield from _key_text(key, defaults[key.path])


def _key_text(key: Any, value: Any) -> Iterator[str]:  # a row of KEYS, and what TOML can say
    yield code(key.path)
    yield f": {cell(prose(key.doc))}"
    said = [f"Rule: {prose(key.rule)}."]
    if value == {}:
        said.append("Default: no entry.")
    elif value is not None:
        said.append(f"Default: `{toml_value(value)}`.")
    elif key.example is not None:
        said.append(f"No default; for example `{toml_value(key.example)}`.")
    yield ""
    yield f"  {cell(' '.join(said))}"
    yield ""


def error_rows(lines: Sequence[str]) -> Iterator[str]:
    """The codes of refusals; the page itself says what each means, as ``code: meaning``."""
    said = dict(line.split(": ", 1) for line in lines if line.strip())
    codes = [one.value for one in errors.Code]
    if missing := sorted(set(codes) ^ set(said)):
        raise Unknown(f"errors that only the code or only the page has: {', '.join(missing)}")
    yield from table(
        ("code", "again?", "what it means"),
        (
            (code(one.value), "yes" if one in errors.RETRYABLE else "", said[one.value])
            for one in errors.Code
        ),
    )


# ---- metrics -------------------------------------------------------------------------------------


def sample(annotation: object) -> Any:  # a value of whatever type a field has
    """Some value of a type: one entry in every table, so that every metric family is made."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return sample(args[0])
    if origin in {typing.Union, types.UnionType}:
        return sample(next(one for one in args if one is not type(None)))
    if origin is tuple:
        return tuple(sample(one) for one in args if one is not Ellipsis)
    if origin is dict:
        return {sample(args[0]): sample(args[1])}
    assert isinstance(annotation, type)
    if issubclass(annotation, msgspec.Struct):
        hints = typing.get_type_hints(annotation, include_extras=True)
        return annotation(**{name: sample(hint) for name, hint in hints.items()})
    return annotation()


def metrics_text(_: str) -> Iterator[str]:
    """Every metric family of ``/metrics``."""
    exposition = Exposition(Metrics("main"), sample(Build), lambda: sample(snapshot.Snapshot))
    rows = []
    for family in exposition.collect():
        labels = vars(family).get("_labelnames") or ()
        ending = {"counter": "_total", "info": "_info"}.get(family.type, "")
        rows.append(
            (
                code(family.name + ending),
                family.type,
                ", ".join(map(code, labels)),
                prose(family.documentation),
            )
        )
    yield from table(("metric", "kind", "labels", "what it counts"), rows)


# ---- stories, benchmarks, rooms ------------------------------------------------------------------


def stories_text(_: str) -> Iterator[str]:
    """Each story as a chapter: its prose as text, what happened as it was written down."""
    for path in sorted(STORIES.glob("*.txt")):
        yield f"## {path.stem.replace('_', ' ').capitalize()}"
        yield ""
        yield from _chapter(path.read_text("utf-8").splitlines())


def _chapter(lines: Sequence[str]) -> Iterator[str]:
    is_code = False
    for line in lines:
        if is_prose := line.startswith("#"):
            if is_code:
                yield "```"
                yield ""
            yield prose(line.lstrip("# "))
        elif line.strip() or is_code:
            if not is_code:
                yield ""
                yield "```text"
            yield line
        is_code = not is_prose and (is_code or bool(line.strip()))
    if is_code:
        yield "```"
    yield ""


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows that were written down by hand from what a command printed."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""


class Measurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One file of ``docs/benchmarks``.

    ``result`` is what the command wrote with ``--json``, as it was; ``tables`` are rows that were
    kept where there is no such file. ``order`` sorts the page; parts of the result in ``hide`` are
    in the file and not on the page.
    """

    order: int
    title: str
    command: str
    date: str
    machine: str
    about: str
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    result: dict[str, Any] | None = None
    hide: tuple[str, ...] = ()


def benchmarks_text(_: str) -> Iterator[str]:
    """Every measurement with its command, date and machine."""
    found = [
        (path.name, msgspec.json.decode(path.read_bytes(), type=Measurement))
        for path in BENCHMARKS.glob("*.json")
    ]
    for name, one in sorted(found, key=lambda pair: (pair[1].order, pair[0])):
        yield f"## {one.title}"
        yield ""
        yield one.about
        yield ""
        kind = "Stored result" if one.result is not None else "Rows kept by hand"
        yield f"`{one.command}`, {one.date}, on {one.machine}. *{kind}:* `docs/benchmarks/{name}`."
        yield ""
        for each in one.tables:
            if each.caption:
                yield f"**{each.caption}**"
                yield ""
            yield from table(each.columns, each.rows)
        if one.result is not None:
            yield from _result_text(one.result, one.hide)
        for note in one.notes:
            yield f"- {note}"
        yield ""


def _result_text(result: dict[str, Any], hide: Sequence[str]) -> Iterator[str]:
    """The JSON of a benchmark: objects of one shape as tables, single figures, then the goals."""
    if "found" in result:
        yield from _found_text(msgspec.convert(result["found"], BenchmarkResult))
        result = {"goals": result["found"]["goals"]}
    goals = list(result.get("goals", ()))
    plain: dict[str, object] = {}
    alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for name, one in result.items():
        if name == "goals" or name in hide:
            continue
        if isinstance(one, list):
            objects = [each for each in one if isinstance(each, dict)]
            goals += [goal for each in objects for goal in each.get("goals", ())]
            yield from _objects_text(name, [_flat(each) for each in objects])
        elif isinstance(one, dict):
            alike.setdefault(tuple(one), []).append({"": name} | _flat(one))
        else:
            plain[name] = one
    for rows in alike.values():
        yield from _objects_text("", rows)
    yield from table(("figure", ""), ((name, _figure(one)) for name, one in plain.items()))
    yield from table(
        ("goal", "wanted", "reached", ""),
        (
            (
                goal["name"],
                f"{'at least' if goal['at_least'] else 'at most'} {_figure(goal['wanted'])}",
                _figure(goal["got"]),
                "met" if _is_met(goal) else "**missed**",
            )
            for goal in goals
        ),
    )


def _found_text(found: BenchmarkResult) -> Iterator[str]:
    """The tables as the command shows them, and what it says of them."""
    for each in found.tables:
        yield f"**{each.title}**"
        yield ""
        rows = ([column.text_of(row) for column in each.columns] for row in each.rows)
        yield from table([column.heading for column in each.columns], rows)
    for note in found.notes:
        yield f"- {note}"
    yield ""


def _objects_text(name: str, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A list of objects, one row each."""
    headers = list(dict.fromkeys(key for row in rows for key in row))
    if headers:
        if name:
            yield f"**{name.replace('_', ' ')}**"
            yield ""
        yield from table(headers, ([_figure(row.get(key, "")) for key in headers] for row in rows))


def _is_met(goal: dict[str, Any]) -> bool:
    got, wanted = goal["got"], goal["wanted"]
    return bool(got >= wanted if goal["at_least"] else got <= wanted)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """An object with what is inside its objects, by dotted names; lists are left out."""
    if not isinstance(value, dict):
        return {}
    flat: dict[str, Any] = {}
    for name, one in value.items():
        if isinstance(one, dict):
            flat |= _flat(one, f"{prefix}{name}.")
        elif not isinstance(one, list):
            flat[f"{prefix}{name}"] = one
    return flat


def _figure(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def rooms_text(_: str) -> Iterator[str]:
    """The map of each package: its own docstring."""
    for name in MAPPED.split():
        if (ROOT / name.replace(".", "/")).is_dir():
            yield from _room(name, 3)
            if name == "kvd.core":
                package = importlib.import_module(name)
                for inner in pkgutil.iter_modules(package.__path__, f"{name}."):
                    if inner.ispkg:
                        yield from _room(inner.name, 4)


def _room(name: str, depth: int) -> Iterator[str]:
    doc = inspect.cleandoc(importlib.import_module(name).__doc__ or "")
    if len(doc.split()) < 3:
        return  # nothing is said there yet
    yield f"{'#' * depth} {code(name)}"
    yield ""
    # A map is drawn with spaces, so it is shown as it is written.
    yield "```text"
    yield doc
    yield "```"
    yield ""


def definitions() -> dict[str, list[str]]:
    """Where each class, function and table of the code is written, by its name."""
    found: dict[str, list[str]] = {}
    for package in (kvd, tui):
        for path in sorted(Path(package.__path__[0]).rglob("*.py")):
            place = str(path.relative_to(ROOT))
            for one in ast.parse(path.read_text("utf-8")).body:
                if isinstance(one, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    found.setdefault(one.name, []).append(place)
                elif isinstance(one, ast.Assign | ast.AnnAssign):
                    targets = one.targets if isinstance(one, ast.Assign) else [one.target]
                    for target in targets:
                        if isinstance(target, ast.Name):
                            found.setdefault(target.id, []).append(place)
    return found


# ---- Sphinx --------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[str], Iterator[str]]] = {
    "cli": cli_text,
    "console-command": console_text,
    "console-keys": keys_text,
    "configuration": configuration_text,
    "messages": messages_text,
    "messages-overview": messages_overview,
    "states": states_text,
    "triggers": triggers_text,
    "events": events_text,
    "snapshot": snapshot_text,
    "metrics": metrics_text,
    "stories": stories_text,
    "benchmarks": benchmarks_text,
    "rooms": rooms_text,
}
"""What a page may ask for; the second word of a fence is handed on."""


class Reference(SphinxDirective):
    """A part of the reference, in the place of its fence."""

    required_arguments = 1
    optional_arguments = 1
    has_content = True

    @override
    def run(self) -> list[nodes.Node]:
        """Make the Markdown and have the page's own parser read it."""
        part, of = self.arguments[0], (self.arguments[1:] or [""])[0]
        if part == "drawing":
            return [nodes.raw("", states_picture(of), format="html")]
        try:
            lines = list(error_rows(self.content) if part == "errors" else PARTS[part](of))
        except (KeyError, Unknown) as exc:
            raise self.error(f"kvd {part} {of}: {exc}") from exc
        text = "\n".join(lines).splitlines()
        parent = nodes.Element()
        self.state.nested_parse(StringList(text, source=""), 0, parent, match_titles=True)
        return list(parent.children)


class Where(SphinxRole):
    """The file in which a class, function or table is written, found by its name."""

    known: typing.ClassVar[dict[str, list[str]]] = {}

    @override
    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """The path; a name that is nowhere, or in several files, is an error of the build."""
        if not self.known:
            self.known.update(definitions())
        name, _, under = self.text.partition(" in ")
        places = [one for one in self.known.get(name, []) if one.startswith(under)]
        if len(places) != 1:
            found = ", ".join(places) or "no file"
            said = self.inliner.reporter.error(f"{name} is in {found}", line=self.lineno)
            return [nodes.literal("", name)], [said]
        return [nodes.literal("", f"{places[0]} ({name})")], []


def setup(app: Sphinx) -> dict[str, bool]:
    """Tell Sphinx of them."""
    app.add_directive("kvd", Reference)
    app.add_role("where", Where())
    return {"parallel_read_safe": True, "parallel_write_safe": True}
