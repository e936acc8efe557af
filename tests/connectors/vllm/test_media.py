"""By which a prompt's pages are found beside its tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvd.connectors.vllm.media import GROWS, NAMED, NO_TOKENS, NUMBERED, MediaKeys

DIGEST, OTHER = "0123456789abcdef" * 4, "fedcba9876543210" * 4


def config(media=True, gb=4, prefixes=True):
    told = SimpleNamespace(mm_processor_cache_gb=gb) if media else None
    return SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=told),
        cache_config=SimpleNamespace(enable_prefix_caching=prefixes),
    )


def request(*features, embeds=None, **more):
    found = [
        SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=length))
        for name, offset, length in features
    ]
    return SimpleNamespace(prompt_embeds=embeds, mm_features=found, **more)


def keys(*features, by_uuid=False, **how):
    return MediaKeys(config(**how), by_uuid=by_uuid).of(request(*features), 32)


def test_each_page_of_an_image_has_a_key_and_no_other():
    found = keys((DIGEST, 40, 64))
    assert list(found) == [1, 2, 3]
    assert len(set(found.values())) == 3
    assert list(keys((DIGEST, 32, 64))) == [1, 2]
    assert keys() == {}


def test_what_it_is_and_where_it_begins_tell_pages_apart():
    assert keys((DIGEST, 40, 8))[1] != keys((OTHER, 40, 8))[1]
    assert keys((DIGEST, 40, 8))[1] != keys((DIGEST, 41, 8))[1]
    assert keys((DIGEST, 40, 8), (OTHER, 48, 8))[1] != keys((OTHER, 40, 8), (DIGEST, 48, 8))[1]
    # And by nothing else: a digest behind an adapter's name is one too.
    assert keys((DIGEST, 40, 8)) == keys((DIGEST, 40, 8), by_uuid=True)
    assert keys((f"adapter: 1:{DIGEST}", 40, 8))[1] != keys((DIGEST, 40, 8))[1]


def test_a_name_with_blanks_is_not_two():
    two = keys(("a", 0, 8), ("b", 8, 8), by_uuid=True)
    assert two[0] != keys(("a 0 1 b", 8, 8), by_uuid=True)[0]
    assert two[0] != keys(("a 0 b", 8, 8), by_uuid=True)[0]


@pytest.mark.parametrize("name", ["first.png", "", DIGEST[:-1], DIGEST.upper(), DIGEST + "\n"])
def test_what_is_no_digest_is_a_user_s_name(name):
    assert keys((DIGEST, 0, 8), (name, 8, 8)) == NAMED
    assert list(keys((name, 8, 8), by_uuid=True)) == [0]


@pytest.mark.parametrize("by_uuid", [False, True])
def test_an_engine_without_caches_counts_its_images(by_uuid):
    assert keys((DIGEST, 0, 8), by_uuid=by_uuid, gb=0, prefixes=False) == NUMBERED
    assert keys(by_uuid=by_uuid, gb=0, prefixes=False) == {}
    assert list(keys((DIGEST, 0, 8), gb=0)) == list(keys((DIGEST, 0, 8), prefixes=False)) == [0]


def test_a_session_that_may_be_given_images_later_is_not_found():
    def of(**how):
        return MediaKeys(config(**how), by_uuid=False).of(request(resumable=True), 32)

    assert of() == GROWS
    assert of(media=False) == {}


def test_a_prompt_of_embeddings_is_not_found():
    assert MediaKeys(config(), by_uuid=False).of(request(embeds=[1.0]), 32) == NO_TOKENS
