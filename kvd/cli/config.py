"""``kvd config``: check, explain and show what the daemon would read; plan a pool for a model."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.text import Text

from kvd.cli import render
from kvd.cli.disk_plan import (
    PlannedPages,
    TierPlan,
    disk_plan,
    no_tier,
    pages_of_family,
    pages_of_vllm,
    store_plan,
    told_of_disk,
    told_of_store,
)
from kvd.cli.exits import Misconfigured, VerbFailed
from kvd.cli.lazy import LazyGroup, Verb
from kvd.cli.options import summary, valid_config, with_printing
from kvd.config import Config, ConfigError, load, pool_spec
from kvd.config import render as toml
from kvd.config.plan import (
    USUAL_CONTEXT_TOKENS,
    FamilyPlan,
    GpuNodePlan,
    Unsuited,
    gpu_node,
    plans,
)
from kvd.config.vllm_plan import VllmPlan, VllmPlanRequest, vllm_plan
from kvd.core.layout.page_sizes import LEAST_PAGE_TOKENS, MOST_PAGE_TOKENS
from kvd.core.layout.shards import listed
from kvd.core.layout.spec import budgets, has_bytes, page_bytes
from kvd.device.presence import absent
from kvd.families import FAMILIES, PlanRequest
from kvd.families.budget import size_bytes
from kvd.families.keys import MAX_PAGES
from kvd.families.model import Model, NotPlanned, model_of
from kvd.families.sharding import SHARD_KEYS
from kvd.pools.build import device_bytes
from kvd.text import clean
from kvd.types import amount

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import RenderableType

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
        "plan": Verb(f"{_HERE}:plan", "What a model takes, by pool family."),
        "lifecycle": Verb(f"{_HERE}:lifecycle_of_store", "The rule that bounds a store."),
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
    if not any(has_bytes(component) for component in spec.components):
        kv = spec.components[0]
        tokens = (spec.pages[0] - 1) * kv.page_size
        return (
            f"{spec.name} counts {tokens} tokens and holds 0 B; a placeholder of one page has "
            f"{amount(page_bytes(kv))}"
        )
    counts = [f"{spec.pages[spec.index(component.name)]} pages" for component in budgets(spec)]
    names = [component.name for component in budgets(spec)]
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
        if not wanted or any(f"{row.key}.".startswith(f"{name}.") for name in wanted)
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


@click.command("lifecycle")
@_sources
def lifecycle_of_store(config_file: Path | None, sets: Sequence[str]) -> None:
    """Print the rule that has the bucket of tiers.store remove what is older than its ttl_s.

    It is JSON as S3 takes it. It replaces the rules that the bucket has: where it has others, add
    this one to them. kvd itself removes nothing from a bucket.
    """
    config = valid_config(config_file, sets)
    if config.tiers_store.endpoint is None:
        raise click.UsageError("there is no tiers.store: set tiers.store.endpoint")
    render.print_json(toml.lifecycle(config))


# ---- what a model takes --------------------------------------------------------------------------


USUAL_BUFFER_TOKENS = 4096

_MAX_BYTES = 2**20
"""Of a config.json: the largest public ones have a few KiB."""


def _size(_ctx: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    """A size as [pool] takes it."""
    if value is not None and not size_bytes(value):
        raise click.BadParameter(f"{value!r} is no size; write for example 80GiB")
    return value


@click.command("plan")
@click.argument(
    "model_path", required=False, type=click.Path(exists=True, path_type=Path), metavar="[MODEL]"
)
@click.option(
    "--model",
    "model_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="CONFIG.json",
    help="The model's config.json, as Hugging Face has it: the same as MODEL.",
)
@click.option(
    "--engine",
    type=click.Choice(["vllm"]),
    help="The pool whose pages are this engine's blocks, and how the engine is started for it.",
)
@click.option("--memory", callback=_size, help="For the pool, like 80GiB.")
@click.option("--host-memory", callback=_size, help="For hisparse. [default: twice --memory]")
@click.option("--disk", callback=_size, help="A tier below the pool, like 500GiB: what it keeps.")
@click.option(
    "--store", callback=_size, help="A store that nodes share, like 10TiB: what it keeps for all."
)
@click.option(
    "--context",
    type=click.IntRange(1, 2**28),
    help="Tokens of one request. [default: what the model was made for]",
)
@click.option(
    "--page-size",
    "--block-size",
    type=click.IntRange(LEAST_PAGE_TOKENS, MOST_PAGE_TOKENS),
    default=16,
    show_default=True,
    help="Tokens of a page; of an engine's block.",
)
@click.option(
    "--buffer-tokens",
    type=click.IntRange(1, 2**28),
    help="For hisparse: tokens of one request on the device. [default: 4096]",
)
@click.option(
    "--dtype",
    help="Element type of the KV. [default: that of the model] With --engine: of the model, as the "
    "engine's own --dtype.",
)
@click.option("--kv-cache-dtype", metavar="TYPE", help="With --engine: as its own. [default: auto]")
@click.option(
    "--pages",
    type=click.IntRange(2, MAX_PAGES),
    help="With --engine: so many, in place of --memory.",
)
@click.option(
    "--tp-size",
    "--tensor-parallel-size",
    type=click.IntRange(1, 4096),
    help="As pool.tp_size. [default: 1]",
)
@click.option(
    "--pipeline-parallel-size",
    type=click.IntRange(1, 4096),
    help="With --engine: as its own. [default: 1]",
)
@click.option("--tp-ranks", metavar="FIRST-LAST", help="As pool.tp_ranks. [default: all]")
@click.option("--stage", metavar="FIRST:END", help="As pool.stage. [default: all layers]")
@click.option("--replicas", type=click.IntRange(1, 128), help="As pool.replicas. [default: 1]")
@click.option("--family", type=click.Choice(list(FAMILIES)), help="Plan for this one only.")
@click.option(
    "--gpu-processes",
    type=click.IntRange(1, 1024),
    help="Engine processes that copy between this pool, in host memory, and GPUs: what it costs "
    "them.",
)
@with_printing
def plan(
    model_path: Path | None,
    model_file: Path | None,
    engine: str | None,
    form: str,
    **options: Any,
) -> None:
    """What a model's KV takes, and how many requests a memory holds, by pool family.

    MODEL is a model's config.json, or the folder where it lies.
    """
    # Any: what click parsed, by the names of ``_wanted``.
    file = _config_file(model_path, model_file)
    try:
        if engine is not None:
            _plan_for_vllm(file, form, **options)
        else:
            _plan_by_family(file, form, **options)
    except NotPlanned as exc:
        raise VerbFailed(f"{file}: {exc}") from exc


def _config_file(path: Path | None, file: Path | None) -> Path:
    if (path is None) == (file is None):
        raise click.UsageError("name one model: a config.json, or the folder where it lies")
    found = path or file
    assert found is not None
    if found.is_dir():
        found /= "config.json"
        if not found.is_file():
            raise VerbFailed(f"{found} is not there: MODEL is a folder with a config.json")
    return found


def _plan_by_family(  # noqa: PLR0913 - one parameter for each option
    file: Path,
    form: str,
    *,
    family: str | None,
    disk: str | None,
    store: str | None,
    gpu_processes: int | None,
    kv_cache_dtype: str | None,
    pages: int | None,
    pipeline_parallel_size: int | None,
    **options: Any,
) -> None:
    for name, given in (
        ("--kv-cache-dtype", kv_cache_dtype),
        ("--pages", pages),
        ("--pipeline-parallel-size", pipeline_parallel_size),
    ):
        if given is not None:
            raise click.UsageError(f"{name} is for --engine")
    if options["memory"] is None:
        raise click.UsageError("say the --memory of the pool, like 80GiB")
    model = model_of(_config_of(file))
    wanted = _wanted(model, **options)
    outcomes = plans(model, wanted, family)
    outcomes = [outcome for outcome in outcomes if family in {None, outcome.family}]
    made = [outcome for outcome in outcomes if isinstance(outcome, FamilyPlan)]
    unsuited = [outcome for outcome in outcomes if isinstance(outcome, Unsuited)]
    told = [f"{outcome.family}: {outcome.why}" for outcome in unsuited]
    if not made:
        what = "for any family: " if family is None else "for "
        raise NotPlanned(f"no plan {what}{'; '.join(told)}")
    best = max(made, key=lambda plan: plan.rooms)
    value = {"model": model, "wanted": wanted, "plans": made, "unsuited": unsuited}
    costs: list[RenderableType] = []
    if gpu_processes is not None:
        value["gpu"] = cost = gpu_node(best, gpu_processes)
        costs.append(Text("\n".join(_gpu_told(best.family, cost))))
    pasted = [Text(_to_paste(best))]
    if (disk or store) and (why := no_tier(best.family)):
        below = "disk" if disk else "store"
        pasted.append(Text(f"no {below} below {best.family}: {why}"))
    else:
        tiers, said = _tiers(pages_of_family(best), disk, store, "--page-size")
        value.update(tiers)
        pasted += map(Text, said)
    render.answer(form, value, Text(_head(model, wanted)), *_blocks(made, told), *costs, *pasted)


def _plan_for_vllm(  # noqa: PLR0913 - one parameter for each option
    file: Path,
    form: str,
    *,
    memory: str | None,
    disk: str | None,
    store: str | None,
    pages: int | None,
    page_size: int,
    dtype: str | None,
    kv_cache_dtype: str | None,
    tp_size: int | None,
    pipeline_parallel_size: int | None,
    **others: object,
) -> None:
    for name, given in others.items():
        if given is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} is not for --engine vllm")
    if (memory is None) == (pages is None):
        raise click.UsageError("say the --memory of the pool, like 80GiB, or how many --pages")
    wanted = VllmPlanRequest(
        block_size=page_size,
        memory_bytes=size_bytes(memory or "") or 0,
        pages=pages or 0,
        dtype=dtype or "auto",
        kv_cache_dtype=kv_cache_dtype or "auto",
        ranks=tp_size or 1,
        stages=pipeline_parallel_size or 1,
    )
    made = vllm_plan(_config_of(file), wanted)
    value, told = msgspec.structs.asdict(made), list(_vllm_told(file, wanted, made))
    tiers, said = _tiers(pages_of_vllm(made, page_size), disk, store, "--block-size")
    value.update(tiers)
    told += said
    render.answer(form, value, *(Text(block) for block in told))


def _tiers(
    pages: PlannedPages, disk: str | None, store: str | None, option: str
) -> tuple[dict[str, TierPlan], list[str]]:
    """Those that were asked for, by name, and each in words; ``option``: as ``told_of_disk``."""
    tiers: dict[str, TierPlan] = {}
    said = []
    if disk is not None:
        tiers["disk"] = of_disk = disk_plan(pages, disk)
        said.append("\n".join(told_of_disk(of_disk, disk, option)))
    if store is not None:
        tiers["store"] = of_store = store_plan(pages, store)
        said.append("\n".join(told_of_store(of_store, store)))
    return tiers, said


def _vllm_told(file: Path, wanted: VllmPlanRequest, made: VllmPlan) -> Iterator[str]:
    of_each = f"{made.layers} layers"
    if wanted.ranks > 1:
        of_each += f" of {wanted.ranks} ranks"
    if wanted.stages > 1:
        of_each += f", in each of {wanted.stages} stages"
    yield (
        f"a block of {wanted.block_size} tokens has {amount(made.page_bytes)} in each of "
        f"{of_each}, {amount(made.block_bytes)} in all; {made.pages} pages hold {made.tokens} "
        f"tokens in {amount(made.pages * made.block_bytes)}"
    )
    yield "\n".join(["not known from here:", *(f"    {line}" for line in made.unknown)])
    model = file.parent if file.name == "config.json" else file
    yield f"""to start, with just these arguments about types and blocks:

vllm serve {shlex.quote(str(model))} \\
    {shlex.join(made.arguments)} \\
    --kv-transfer-config '{{
  "kv_connector": "KvdConnector", "kv_connector_module_path": "kvd.connectors.vllm",
  "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}}'
"""
    yield f"to paste, into kvd.toml:\n\n{made.toml}"


def _config_of(file: Path) -> dict[str, object]:
    if file.stat().st_size > _MAX_BYTES:
        raise NotPlanned(f"has more than {_MAX_BYTES} bytes, so it is no model's config.json")
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as exc:
        raise NotPlanned(f"is not JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise NotPlanned("holds no table of keys")
    return config


def _wanted(
    model: Model,
    *,
    memory: str,
    host_memory: str | None,
    context: int | None,
    page_size: int,
    buffer_tokens: int | None,
    dtype: str | None,
    **shards: str | int | None,
) -> PlanRequest:
    twice = f"{2 * (size_bytes(memory) or 0) // 2**10}KiB"
    return PlanRequest(
        memory=memory,
        host_memory=host_memory or twice,
        context_tokens=context or model.context_tokens or USUAL_CONTEXT_TOKENS,
        page_size=page_size,
        buffer_tokens=buffer_tokens or USUAL_BUFFER_TOKENS,
        dtype=dtype,
        shards={name: given for name in SHARD_KEYS if (given := shards[name]) is not None},
    )


def _blocks(made: list[FamilyPlan], told: list[str]) -> Iterator[RenderableType]:
    """The plans, what is not planned and why, and the best one to paste."""
    sheet = render.TextTable("FAMILY", "B/TOKEN>", "TOKENS>", "A REQUEST>", "ROOMS>", "GAIN>")
    for plan in made:
        sheet.row(
            plan.family,
            str(plan.bytes_per_token),
            str(plan.tokens),
            amount(plan.request_bytes),
            str(plan.rooms),
            f"{plan.gain:.2f}x",
            prose="\n".join([plan.note, *_parts(plan)]),
        )
    yield sheet
    if told:
        yield Text("\n".join(["not planned", *(f"    {line}" for line in told)]), "dim")


def _to_paste(best: FamilyPlan) -> str:
    """The section of the plan that admits most requests."""
    toml = "\n".join(clean(line) for line in best.toml.splitlines())
    return f"to paste, for {best.family}:\n\n{toml}"


def _gpu_told(family: str, cost: GpuNodePlan) -> Iterator[str]:
    """What a pool in host memory costs engines that compute on GPUs, line by line."""
    yield f"beside GPUs, for {family}, {cost.processes} processes (measured on one H100):"
    yield (
        f"    {cost.tokens_per_gib} tokens a GiB of host memory; a request is loaded in "
        f"{cost.load_s * 1e3:.0f} ms, at {cost.copied_gb_s:.0f} GB/s"
    )
    yield (
        f"    each process pins {amount(cost.pinned_bytes)} with CUDA: they are never swapped, and "
        f"it takes {cost.registering_s:.1f} s beside its start"
    )
    yield (
        "    a CUDA context takes 518 MiB of the GPU in each process, "
        f"{amount(cost.contexts_bytes)} in all; the daemon makes none"
    )
    yield (
        f"    K and V of a block in a layer are a piece of {amount(cost.piece_bytes)}; all layers "
        f"of a block together would be one of {amount(cost.page_bytes)}"
    )
    if cost.is_slow:
        yield (
            "    pieces below 64 KiB are slow (16 KiB 23 GB/s, 4 KiB 10): larger pages, or a KV "
            "cache layout that keeps all layers of a block together"
        )


def _head(model: Model, wanted: PlanRequest) -> str:
    kinds = [
        f"{count} {what}"
        for count, what in (
            (model.layers, "full layers"),
            (model.window_layers, f"layers with a window of {model.window_tokens}"),
            (model.state_layers, "layers with a state"),
        )
        if count
    ]
    return (
        f"{clean(model.name)}: {', '.join(kinds)}; requests of {wanted.context_tokens} tokens, "
        f"pages of {wanted.page_size}, {wanted.memory}"
    )


def _parts(made: FamilyPlan) -> list[str]:
    return [
        f"{part.name}: {part.pages} pages of {amount(part.page_bytes)}"
        + (f" in {part.shards} shards" if part.shards > 1 else "")
        + f" ({amount(part.total_bytes)} {part.tier}), {part.request_pages} a request"
        for part in made.parts
    ]
