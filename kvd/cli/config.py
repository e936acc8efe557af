"""``kvd config``: check, explain and show the configuration that the daemon would read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvd.cli import render
from kvd.cli.exits import Misconfigured
from kvd.cli.lazy import LazyGroup, Verb
from kvd.cli.options import summary, valid_config, with_printing
from kvd.config import Config, ConfigError, load, pool_spec
from kvd.config import render as toml
from kvd.core.layout.shards import listed
from kvd.core.layout.spec import budgets, has_bytes, page_bytes
from kvd.device.presence import absent
from kvd.pools.build import device_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvd.core.layout.spec import PoolSpec


def _sources(verb: Callable[..., None]) -> Callable[..., None]:
    """The options that say where values come from."""
    file = click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Read FILE and conf.d beside it instead of /etc/kvd/kvd.toml.",
    )
    sets = click.option(
        "--set",
        "sets",
        multiple=True,
        metavar="KEY=VALUE",
        help="Override one key, like pool.size=1GiB. May be repeated.",
    )
    return file(sets(verb))


_HERE = "kvd.cli.config"


@click.group(
    "config",
    cls=LazyGroup,
    verbs={
        "check": Verb(f"{_HERE}:check", "Everything that is wrong, at once."),
        "explain": Verb(f"{_HERE}:explain", "Each key: value, origin, meaning, rule."),
        "show": Verb(f"{_HERE}:show", "The effective configuration as TOML."),
        "plan": Verb("kvd.cli.plan:plan_command", "What a model takes, by pool family."),
    },
)
def config_group() -> None:
    """Check, explain or show settings; plan a pool for a model."""


@click.command("check")
@_sources
@with_printing
@click.pass_context
def check(ctx: click.Context, config_file: Path | None, sets: Sequence[str], form: str) -> None:
    """Report everything that is wrong, at once; exit status 78 if anything is."""
    loaded = load(config_file, os.environ, sets)
    if isinstance(loaded, Config):
        loaded = _no_devices(loaded) or loaded
    if form == "json":
        errors = [] if isinstance(loaded, Config) else loaded
        render.print_json({"ok": not errors, "errors": errors})
        ctx.exit(Misconfigured.exit_code if errors else 0)
    if not isinstance(loaded, Config):
        raise Misconfigured(summary(loaded))
    click.echo(f"ok: node {loaded.node.name}, pool {_pool_in_words(pool_spec(loaded))}")


def _no_devices(config: Config) -> list[ConfigError]:
    """That the pool is to lie on devices which this host has not."""
    found = absent(device_bytes(pool_spec(config)))
    if found is None:
        return []
    return [
        ConfigError(
            where="this host",
            key="pool.device",
            value=config.pool.device,
            rule=found.why,
            fix=found.fix,
        )
    ]


def _pool_in_words(spec: PoolSpec) -> str:
    """Its pages by budget; where nothing is held, the tokens that are counted."""
    if not any(has_bytes(one) for one in spec.components):
        kv = spec.components[0]
        tokens = (spec.pages[0] - 1) * kv.page_size
        return (
            f"{spec.name} counts {tokens} tokens and holds 0 bytes; a placeholder of one page has "
            f"{page_bytes(kv)}"
        )
    counts = [f"{spec.pages[spec.index(one.name)]} pages" for one in budgets(spec)]
    names = [one.name for one in budgets(spec)]
    if len(names) == 1:
        if spec.held is None:
            return f"{spec.name} of {counts[0]}"
        shards = spec.held.shards
        return f"{spec.name} of {counts[0]} in {len(shards)} shards: {listed(shards)}"
    held = " and ".join(f"{pages} of {name}" for pages, name in zip(counts, names, strict=True))
    return f"{spec.name} of {held}"


@click.command("explain")
@click.argument("wanted", nargs=-1, metavar="[KEY]...")
@_sources
@with_printing
def explain(
    wanted: Sequence[str], config_file: Path | None, sets: Sequence[str], form: str
) -> None:
    """Each key with its value, where that came from, what it means and its rule.

    A KEY is a section or section.key; without any, all are explained.
    """
    rows = [
        row
        for row in toml.explanations(valid_config(config_file, sets))
        if not wanted or row.key in wanted or row.key.partition(".")[0] in wanted
    ]
    if wanted and not rows:
        raise click.UsageError(f"no key or section is named {' or '.join(wanted)}")
    if form == "json":
        render.print_json(rows)
        return
    for row in rows:
        click.echo(f"{click.style(row.key, bold=True)} = {row.shown}   ({row.origin})")
        click.echo(f"    {row.doc}\n    Rule: {row.rule}.")


@click.command("show")
@click.option("--example", is_flag=True, help="Print a commented file of all defaults instead.")
@_sources
@with_printing
def show(*, example: bool, config_file: Path | None, sets: Sequence[str], form: str) -> None:
    """Print the effective configuration as TOML: what a file would have to say."""
    if example:
        click.echo(toml.example(), nl=False)
        return
    config = valid_config(config_file, sets)
    if form == "json":
        render.print_json(toml.as_tables(config))
        return
    click.echo(toml.effective(config), nl=False)
