"""mla: one latent per token and layer, which attention expands; every rank of a group has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from kvd.families.budget import one_budget
from kvd.families.family import ELEMENTS, INDEX, LATENT, SCALE, PoolFamily
from kvd.families.keys import PoolSection
from kvd.families.mha import components, full_note, plan_keys

if TYPE_CHECKING:
    from kvd.families.model import Model


class LatentPool(PoolSection, frozen=True):
    """[pool] of this family."""

    @property
    @override
    def keeps_latents(self) -> bool:
        return True


def _unsuited(model: Model, _asked: str | None) -> str | None:
    if model.without_kv:
        return model.without_kv
    return None if model.latent_dim else "it keeps K and V per head"


FAMILY = PoolFamily(
    name="mla",
    owns="one latent per layer",
    section=LatentPool,
    components=components,
    divide=one_budget,
    groups=(ELEMENTS, LATENT, SCALE, INDEX),
    needs={"latent_dim": "the model's kv_lora_rank, like 512"},
    uncounted="attention over latents expands them from the pool, so they must be written",
    unsuited=_unsuited,
    plan_keys=plan_keys,
    plan_note=full_note,
    is_full=True,
    shape={"layers": 2, "latent_dim": 32, "rope_dim": 8},
)
