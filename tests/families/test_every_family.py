"""What holds for each row of the registry: a new family is tested here by being in it."""

from __future__ import annotations

import pytest

from kvd.config import Config, load, pool_spec
from kvd.config.host import HostFacts
from kvd.config.keys import KEYS
from kvd.config.pool import BELONGS, is_of_use
from kvd.config.render import as_tables, effective
from kvd.core.inspect.snapshot import snapshot
from kvd.core.layout.page_sizes import pages_in
from kvd.core.layout.spec import (
    PoolSpec,
    Whole,
    companion_factor,
    companion_pages,
    exchanged,
    is_companion,
)
from kvd.families import FAMILIES, POOLS, PoolFamily, PoolSection
from kvd.families.budget import least_pages
from kvd.types import NULL_PAGE, page_ids
from kvd.wire import client
from tests.core.world import Side, World, tokens

HOST = HostFacts(node_name="node-0", runtime="/run/kvd", config_file="/nonexistent/kvd.toml")
PROMPT = tokens((1, 100))
ROOM = 7

Family = PoolFamily[PoolSection]
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
every_pool = pytest.mark.parametrize("family", POOLS.values(), ids=POOLS)


def sets_of(family: Family, **more: object) -> list[str]:
    """The shape of a family as ``--set`` texts."""
    name = {} if family.is_mode else {"family": family.name}
    sections = {**family.with_sections, "pool": {**name, **family.shape, **more}}
    out = []
    for section, keys in sections.items():
        for key, value in keys.items():
            if isinstance(value, dict):
                out += [f"{section}.{key}.{entry}={item}" for entry, item in value.items()]
            else:
                out.append(f"{section}.{key}={value}")
    return out


def config_of(family: Family, **more: object) -> Config:
    loaded = load(None, {}, sets_of(family, **more), host=HOST)
    assert isinstance(loaded, Config), [error.sentence for error in loaded]
    return loaded


@every_family
def test_the_shape_of_a_family_is_a_valid_pool_of_it(family: Family) -> None:
    config = config_of(family)
    spec = pool_spec(config)

    assert spec.family == family.name
    assert spec.components[0].name == "kv"
    assert isinstance(config.pool, family.section)
    page = spec.components[0].page_size
    assert all(pages_in(page, one.page_size) for one in spec.components)


@every_family
def test_every_component_has_room_for_one_request_in_the_usual_memory(family: Family) -> None:
    spec = pool_spec(config_of(family))

    for one, pages in zip(spec.components, spec.pages, strict=True):
        least = 2 if isinstance(one.extent, Whole) else least_pages(one)
        assert pages >= least, one.name


@every_family
def test_what_is_shown_of_a_configuration_gives_the_same_pool(tmp_path, family: Family) -> None:
    config = config_of(family)
    file = tmp_path / "kvd.toml"
    file.write_text(effective(config))

    again = load(file, {}, (), host=HOST)

    assert isinstance(again, Config), [error.sentence for error in again]
    assert pool_spec(again) == pool_spec(config)
    assert as_tables(again) == as_tables(config)


@every_pool
def test_its_own_keys_are_documented_and_say_nothing_elsewhere(family: Family) -> None:
    config = config_of(family)
    own = [one for one in family.section.__struct_fields__ if one in BELONGS]

    for name in own:
        key = KEYS[f"pool.{name}"]
        assert key.doc
        assert key.default is not None or key.example is not None
        if name not in PoolSection.__struct_fields__:
            assert family.alone
            assert is_of_use(config, key.path)
    for name in family.needs:
        assert f"pool.{name}" in KEYS
    assert not family.second or f"pool.{family.second}" in KEYS


@every_pool
def test_a_family_without_a_key_that_it_needs_is_told_which(family: Family) -> None:
    for name, example in family.needs.items():
        gone = (f"pool.{name}=", f"pool.{name}.", "pool.rope_dim=")
        sets = [text for text in sets_of(family) if not text.startswith(gone)]

        loaded = load(None, {}, sets, host=HOST)

        assert not isinstance(loaded, Config)
        assert [(error.key, error.rule) for error in loaded] == [
            ("pool.family", f"needs pool.{name}: {example}")
        ]


def write(side: Side, spec: PoolSpec, leased: client.Leased) -> dict[str, set[str]]:
    """What each page holds says which component and which tokens it is; by component."""
    own = [one.component.name for one in side.node.leases.components.each]
    rows = {"kv": leased.pages, **dict(zip(own, leased.beside, strict=True))}
    for one in spec.components:
        if is_companion(spec, one):
            rows[one.name] = companion_pages(leased.pages, companion_factor(spec, one))
    for name, row in rows.items():
        for k, page in enumerate(page_ids(row)):
            if page != NULL_PAGE:
                side.memory_of(name)[page] = f"{name}:{k}"
    return {name: set(side.memory_of(name).values()) for name in rows}


def all_free(side: Side, spec: PoolSpec) -> bool:
    """Whether each page of each budget is free or cached, but for the null page."""
    return all(
        1 + one.free_pages + one.cached_pages == one.total_pages
        for one in snapshot(side.node).pools
        if one.component in {part.name for part in spec.components}
    )


@every_pool
def test_a_prompt_goes_from_one_node_to_another_and_every_page_is_accounted_for(
    family: Family,
) -> None:
    """The core is told nothing of the family: it meets components that it knows."""
    few = {family.second: 40} if family.second else {}
    spec = pool_spec(config_of(family, pages=400, saved_size="0KiB", **few))
    world = World(spec=spec)
    lease = world.p.lease(PROMPT)
    written = write(world.p, spec, lease)
    reply = world.p.call(client.SendRequest, PROMPT, room=ROOM, lease=lease.lease)
    assert isinstance(reply, client.Sending), reply

    world.d.call(client.ReceiveRequest, PROMPT, room=ROOM, source=("p",))
    world.p.call(client.Finish, send=reply.send, aux=b"aux")

    (got,) = [one for one in world.d.take() if isinstance(one, client.Received)]
    for one in exchanged(spec):
        landed = set(world.d.memory_of(one.name).values())
        assert bool(landed) == bool(one.layers), one.name
        assert landed <= written[one.name]
    world.d.call(client.CommitAndRelease, lease=got.lease)
    world.p.call(client.CommitAndRelease, lease=lease.lease)
    assert all_free(world.p, spec)
    assert all_free(world.d, spec)
