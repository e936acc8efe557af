"""What a page tells its reader to type, and whether click would take it."""

from __future__ import annotations

import importlib
import re
import shlex

import click

FENCE = re.compile(r"^(`{3,})(\{?[\w-]*\}?)[^\n]*\n(.*?)^\1", flags=re.S | re.M)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
COMMANDS = {
    "kvd": ("kvd.cli", "kvd"),
    "kvd-tui": ("tui.cli", "main"),
    "python -m benchmarks": ("benchmarks.__main__", "main"),
}


def without_fences(text):
    return FENCE.sub("", text)


def command_lines(text):
    """What is typed: lines of shell fences, and code that begins with a command of ours."""
    for _, language, body in FENCE.findall(text):
        if language == "sh":
            yield from body.replace("\\\n", " ").splitlines()
    yield from SPAN.findall(without_fences(text))


def ours(line):
    """The command, its name and its words, if the line calls one of ours; None else."""
    found = re.match(r"(?:\S*/)?(kvd-tui|kvd|python -m benchmarks)(?: |$)", line)
    if found is None:
        return None
    words = shlex.split(line[found.end() :].removesuffix(" &"), comments=True)
    module, attribute = COMMANDS[found[1]]
    return vars(importlib.import_module(module))[attribute], found[1], words


def fault(command, path, words):
    """Why click would refuse these words; None if it would not. Values are not looked at."""
    context = click.Context(command, info_name=path)
    if isinstance(command, click.Group):
        if not words or words[0].startswith("-"):
            command.make_parser(context).parse_args(list(words))
            return None
        inner = command.get_command(context, words[0])
        if inner is None:
            return f"{path} has no verb {words[0]}"
        return fault(inner, f"{path} {words[0]}", words[1:])
    try:
        _, rest, _ = command.make_parser(context).parse_args(list(words))
    except click.UsageError as exc:
        return f"{path}: {exc.format_message()}"
    return f"{path} takes no {' '.join(rest)}" if rest else None
