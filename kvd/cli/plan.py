"""``kvd config plan``: from a model's config.json to the pools that a memory holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from kvd.cli.exits import VerbFailed
from kvd.cli.options import with_printing
from kvd.cli.render import TextTable, answer
from kvd.config.plan import USUAL_CONTEXT_TOKENS, FamilyPlan, Outcome, Unsuited, plans
from kvd.core.layout.page_sizes import LEAST_PAGE_TOKENS, MOST_PAGE_TOKENS
from kvd.families import FAMILIES, PlanRequest
from kvd.families.budget import size_bytes
from kvd.families.model import Model, NotPlanned, model_of
from kvd.families.sharding import SHARD_KEYS
from kvd.text import amount, clean

if TYPE_CHECKING:
    from rich.console import RenderableType

_MAX_BYTES = 2**20
"""Of a config.json: the largest public ones have a few KiB."""


def _size(_ctx: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    """A size as [pool] takes it."""
    if value is not None and not size_bytes(value):
        raise click.BadParameter(f"{value!r} is no size; write for example 80GiB")
    return value


@click.command("plan")
@click.option(
    "--model",
    "model_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    metavar="CONFIG.json",
    help="The model's config.json, as Hugging Face has it.",
)
@click.option("--memory", required=True, callback=_size, help="For the pool, like 80GiB.")
@click.option("--host-memory", callback=_size, help="For hisparse. [default: twice --memory]")
@click.option(
    "--context",
    type=click.IntRange(1, 2**28),
    help="Tokens of one request. [default: what the model was made for]",
)
@click.option(
    "--page-size",
    type=click.IntRange(LEAST_PAGE_TOKENS, MOST_PAGE_TOKENS),
    default=16,
    show_default=True,
)
@click.option(
    "--buffer-tokens",
    type=click.IntRange(1, 2**28),
    default=4096,
    show_default=True,
    help="For hisparse: tokens of one request on the device.",
)
@click.option("--dtype", help="Element type of the KV. [default: that of the model]")
@click.option("--tp-size", type=click.IntRange(1, 4096), help="As pool.tp_size. [default: 1]")
@click.option("--tp-ranks", metavar="FIRST-LAST", help="As pool.tp_ranks. [default: all]")
@click.option("--stage", metavar="FIRST:END", help="As pool.stage. [default: all layers]")
@click.option("--replicas", type=click.IntRange(1, 128), help="As pool.replicas. [default: 1]")
@click.option("--family", type=click.Choice(list(FAMILIES)), help="FamilyPlan this one only.")
@with_printing
def plan_command(model_file: Path, family: str | None, form: str, **options: Any) -> None:
    """What a model's KV takes, and how many requests a memory holds, by pool family."""
    # Any: what click parsed, by the names of ``_wanted``.
    try:
        model = _model(model_file)
        wanted = _wanted(model, **options)
        outcomes = plans(model, wanted, family)
    except NotPlanned as exc:
        raise VerbFailed(f"{model_file}: {exc}") from exc
    if family is not None:
        outcomes = [one for one in outcomes if one.family == family]
        for one in outcomes:
            if not isinstance(one, FamilyPlan):
                raise VerbFailed(f"{model_file}: no plan for {family}: {one.why}")
    if not any(isinstance(one, FamilyPlan) for one in outcomes):
        told = "; ".join(
            f"{one.family}: {one.why}" for one in outcomes if isinstance(one, Unsuited)
        )
        raise VerbFailed(f"{model_file}: no plan for any family: {told}")
    value = _as_tables(model, wanted, outcomes)
    answer(form, value, *_blocks(model, wanted, outcomes))


def _model(file: Path) -> Model:
    if file.stat().st_size > _MAX_BYTES:
        raise NotPlanned(f"has more than {_MAX_BYTES} bytes, so it is no model's config.json")
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as exc:
        raise NotPlanned(f"is not JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise NotPlanned("holds no table of keys")
    return model_of(config)


def _wanted(
    model: Model,
    *,
    memory: str,
    host_memory: str | None,
    context: int | None,
    page_size: int,
    buffer_tokens: int,
    dtype: str | None,
    **shards: str | int | None,
) -> PlanRequest:
    twice = f"{2 * (size_bytes(memory) or 0) // 2**10}KiB"
    return PlanRequest(
        memory=memory,
        host_memory=host_memory or twice,
        context_tokens=context or model.context_tokens or USUAL_CONTEXT_TOKENS,
        page_size=page_size,
        buffer_tokens=buffer_tokens,
        dtype=dtype,
        shards={name: given for name in SHARD_KEYS if (given := shards[name]) is not None},
    )


def _as_tables(model: Model, wanted: PlanRequest, outcomes: list[Outcome]) -> dict[str, object]:
    return {
        "model": model,
        "wanted": wanted,
        "plans": [one for one in outcomes if isinstance(one, FamilyPlan)],
        "unsuited": [one for one in outcomes if isinstance(one, Unsuited)],
    }


def _blocks(model: Model, wanted: PlanRequest, outcomes: list[Outcome]) -> list[RenderableType]:
    made = [one for one in outcomes if isinstance(one, FamilyPlan)]
    sheet = TextTable("FAMILY", "B/TOKEN>", "TOKENS>", "A REQUEST>", "ROOMS>", "GAIN>")
    for one in made:
        sheet.row(
            one.family,
            str(one.bytes_per_token),
            str(one.tokens),
            amount(one.request_bytes),
            str(one.rooms),
            f"{one.gain:.2f}x",
            prose="\n".join([one.note, *_parts(one)]),
        )
    told = [f"{one.family}: {one.why}" for one in outcomes if not isinstance(one, FamilyPlan)]
    blocks: list[RenderableType] = [Text(_head(model, wanted)), sheet]
    if told:
        blocks.append(Text("\n".join(["not planned", *(f"    {line}" for line in told)]), "dim"))
    best = max(made, key=lambda one: one.rooms, default=None)
    if best is not None:
        toml = "\n".join(clean(line) for line in best.toml.splitlines())
        blocks.append(Text(f"to paste, for {best.family}:\n\n{toml}"))
    return blocks


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


def _parts(plan: FamilyPlan) -> list[str]:
    return [
        f"{one.name}: {one.pages} pages of {amount(one.page_bytes)}"
        + (f" in {one.shards} shards" if one.shards > 1 else "")
        + f" ({amount(one.total_bytes)} {one.tier}), {one.request_pages} a request"
        for one in plan.parts
    ]
