"""Engines of several ranks, for real: ``python -m tests.demo.divided CASE...``, a line for each.

A case is ``WAY:MODEL:RANKS``. Each is a process of its own, which becomes so many ranks; they
compute over the layouts of real pools, in plain memory, and are compared with one process: the
logits, and the KV that each rank has in its pages.
"""

from __future__ import annotations

import os
import sys
from functools import partial

import msgspec
import torch

from kvd.demo.division import DivisionWay, heads_of, stage_of
from kvd.demo.group import Group, fork
from kvd.demo.layout import PoolPart
from kvd.demo.leased import Alone, Lengths, PoolViews, Sequences
from kvd.demo.models import ARCHITECTURES, Architecture
from kvd.demo.ranks import (
    ContextSequence,
    PageRow,
    StageSequence,
    Together,
    keep_layers,
    open_gather,
    own_heads,
)
from tests.demo.memory import PAGE, pool, scattered
from tests.demo.reference import model_of, tokens

PIECES = (64, 64, 20, 3, 1, 1)
"""The last three are too few for 2 or 4 ranks to cut zigzag, and leave some without any."""
ROW = scattered(-(-sum(PIECES) // PAGE))


class Compared(msgspec.Struct, frozen=True):
    """One case: the largest differences, of a logit behind any piece, and of KV in any page.

    ``spoiled``: of a logit behind one more token, with one page of one rank zeroed.
    """

    case: str
    logits: float
    kv: float
    spoiled: float


def sequences_of(way: DivisionWay, row: Architecture, group: Group) -> Sequences:
    """What this rank computes with, over memory for its part; its model is cut down to that."""
    model, shape = model_of(row.name), row.shape
    if way is DivisionWay.TENSOR:
        own = heads_of(shape, group.rank, group.ranks)
        own_heads(model, shape, group)
        return Alone(model, _views(row, kv_heads=own.end_kv - own.first_kv))
    if way is DivisionWay.CONTEXT:
        make = partial(ContextSequence, model, group=group, gather=open_gather(group))
        return Together(_views(row), group, make)
    first, end = stage_of(shape.layers, group.rank, group.ranks)
    keep_layers(model, first, end)
    views = _views(row, layers=end - first)
    return Together(views, group, partial(StageSequence, model, group=group))


def _views(row: Architecture, **part: int) -> PoolViews:
    shape = msgspec.structs.replace(row.shape, **part)
    return pool(msgspec.structs.replace(row, shape=shape))[1]


def logits_of(sequences: Sequences, pieces: list[list[int]], row: list[int]) -> torch.Tensor:
    """Behind each piece: (pieces, vocabulary)."""
    sequence = sequences.begin(PageRow(tuple(row)), Lengths(0, 0), step_tokens=64)
    return torch.stack([sequences.known(sequence.compute(piece)) for piece in pieces])


def compare(case: str) -> Compared:
    """One case, on each of its ranks."""
    first, name, last = case.split(":")
    way, ranks = DivisionWay(first), int(last)
    row = ARCHITECTURES[name]
    ids = iter(tokens(sum(PIECES))[0].tolist())
    pieces = [[next(ids) for _ in range(size)] for size in PIECES]
    alone = Alone(model_of(name), _views(row))
    theirs = logits_of(alone, pieces, ROW)

    group = fork(ranks)
    divided = sequences_of(way, row, group)
    ours = logits_of(divided, pieces, ROW)
    kv = max(
        float((mine[ROW] - whole[ROW]).abs().max())
        for mine, whole in zip(_kv(divided.views), _own_kv(alone.views, way, group), strict=True)
    )
    if group.rank == (
        0 if way is DivisionWay.CONTEXT else ranks - 1
    ):  # of some context, 0 computes one
        divided.views.damage(PoolPart.KV, ROW[3])
    last = divided.begin(
        PageRow(tuple(ROW)), Lengths(sum(PIECES) - 1, sum(PIECES) - 1), step_tokens=64
    )
    spoiled = divided.known(last.compute(pieces[-1]))
    worst = max(float(one) for one in group.gathered(str(kv).encode()))
    if group.rank:
        os._exit(0)
    return Compared(
        case,
        float((ours - theirs).abs().max()),
        worst,
        float((spoiled - theirs[-1]).abs().max()),
    )


def _kv(views: PoolViews) -> list[torch.Tensor]:
    """Every tensor of every layer."""
    return [tensor for layer in views.layers for tensor in layer]


def _own_kv(whole: PoolViews, way: DivisionWay, group: Group) -> list[torch.Tensor]:
    """What a rank must have of what one process has."""
    shape = whole.shape
    if way is DivisionWay.PIPELINE:
        first, end = stage_of(shape.layers, group.rank, group.ranks)
        return [tensor for layer in whole.layers[first:end] for tensor in layer]
    if way is DivisionWay.TENSOR and not shape.latent_dim:
        own = heads_of(shape, group.rank, group.ranks)
        return [tensor[:, :, own.first_kv : own.end_kv] for tensor in _kv(whole)]
    return _kv(whole)


def main(cases: list[str]) -> None:
    """Each in a process of its own, one after the other."""
    torch.set_num_threads(1)
    for case in cases:
        model_of(case.split(":")[1])  # built here, all cases of a model have the same one
        child = os.fork()
        if not child:
            compared = compare(case)
            os.write(1, msgspec.json.encode(compared) + b"\n")
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if status:
            sys.exit(f"{case} ended with status {status}")


if __name__ == "__main__":
    main(sys.argv[1:])
