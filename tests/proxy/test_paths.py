"""Which requests go on to engines, and how their paths may be spelled."""

from __future__ import annotations

from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.proxy.paths import TOKEN_PATHS, NotForwarded, check_forwarded, target_of


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/completions/", "//v1/completions", "/v1//completions", "/x/../v1/completions"),
        *("/v1/./completions", "/v1/completions/.", "/..", "/v1/completions;x", "/;/v1"),
        *("/v1/%63ompletions", "/v1/completions%2f", "/v1%2Fcompletions", "/%2e%2e/v1", "/%2E"),
        *("/v1/a%5Cb", "/v1/a%00", "/v1/a%0a", "/v1/a%3F", "/v1/a%23", "/v1/%25", "/v1/%3B"),
        *("/v1/a\\b", "/v1/a b", "/v1/a\tb", "/v1/a#b", "/v1/%", "/v1/%zz", "/v1/%c3%a9"),
        *("/v1/é", "/v1/\x7f", '/v1/a"b', "/v1/<", "", "v1/completions", "@h/x", ":22/x", "*"),
        *("http://h/../x", "http://[h/x", "https://h//x", "ftp://h/x", "/v1/" + "a" * 5000),
        *("/v1/a?b#c", "/v1/a?b c", "/v1/a?%zz", '/v1/a?"', "/v1/a?é"),
    ],
)
def test_a_path_of_more_than_one_spelling_goes_nowhere(path):
    with pytest.raises(NotForwarded) as caught:
        target_of(path)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("raw", "path", "query"),
    [
        ("/v1/completions", "/v1/completions", ""),
        ("/v1/completions?", "/v1/completions", "?"),
        ("/v1/models?full=1&a=%2F..", "/v1/models", "?full=1&a=%2F.."),
        ("/v1/models/org/a%20b%C3%A9:1@x", "/v1/models/org/a%20b%C3%A9:1@x", ""),
        ("http://h/v1/models?a=?b", "/v1/models", "?a=?b"),
        ("HTTPS://u:p@h:1", "/", ""),
        ("http://h?a=1", "/", "?a=1"),
        ("/", "/", ""),
    ],
)
def test_what_has_one_spelling_goes_on_as_it_came(raw, path, query):
    target = target_of(raw)
    assert (target.path, target.query) == (path, query)
    assert target.as_it_came == path + query


@given(st.text(st.sampled_from("/.%2eEfFcC;v1ompletions\\?#"), max_size=30))
def test_no_path_reads_like_one_for_tokens_and_is_not_taken_for_one(raw):
    try:
        target = target_of(f"/{raw}")
    except NotForwarded:
        return
    lenient = unquote(target.path).rstrip("/").partition(";")[0]
    assert target.is_for_tokens == (lenient in TOKEN_PATHS)


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/completions", "/v1/responses", "/v1/audio/transcriptions", "/v2/rerank", "/version"),
        *("/tokenize", "/inference/v1/generate", "/score", "/v1/responses/abc/cancel"),
    ],
)
def test_what_is_for_clients_goes_on(path):
    check_forwarded("POST", path)


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/sleep", "/collective_rpc", "/reset_prefix_cache", "/update_weights", "/v1"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/V1/completions", "/tokenizer"),
        *("/tokenize/x", "/inference/v1/abort_requests", "/metrics", "/docs", "/server_info"),
    ],
)
def test_what_is_for_operators_does_not(path):
    with pytest.raises(NotForwarded) as caught:
        check_forwarded("POST", path)
    assert caught.value.status == 404


def test_further_paths_go_on_where_they_are_named():
    check_forwarded("GET", "/server_info", ("/server_info",))
    check_forwarded("POST", "/a/b", ("/a/",))
    with pytest.raises(NotForwarded):
        check_forwarded("GET", "/server_info/x", ("/server_info",))


@pytest.mark.parametrize("method", ["TRACE", "CONNECT", "PROPFIND", "get"])
def test_methods_of_no_http_api_go_nowhere(method):
    with pytest.raises(NotForwarded) as caught:
        check_forwarded(method, "/v1/models")
    assert caught.value.status == 405
