"""Keys and their files."""

from __future__ import annotations

import os
import stat

import pytest
import zmq
from zmq.utils import z85

from kvd import curve


def test_a_new_pair_is_two_keys_and_the_public_one_follows_from_the_secret():
    pair = curve.new_pair()

    assert [curve.is_key(pair.public), curve.is_key(pair.secret)] == [True, True]
    assert pair.public != pair.secret
    assert curve.pair_of(pair.secret).public == pair.public


def test_keys_are_those_of_libzmq():
    for _ in range(50):
        ours, (public, secret) = curve.new_pair(), zmq.curve_keypair()

        assert curve.pair_of(secret.decode()).public.encode() == public
        assert zmq.curve_public(ours.secret.encode()).decode() == ours.public
        assert curve.raw(ours.public) == z85.decode(ours.public)


def test_a_pair_does_not_show_its_secret():
    pair = curve.new_pair()

    assert pair.secret not in repr(pair)
    assert pair.secret not in repr(curve.PeerKeys(pair, {}))


@pytest.mark.parametrize(
    "text",
    ["", "0" * 39, "0" * 41, "0" * 39 + " ", "0" * 39 + "\n", "0" * 39 + '"', "0" * 35 + "#####"],
)
def test_what_is_no_key(text):
    assert not curve.is_key(text)


def test_the_largest_key_is_one():
    assert curve.is_key("%nSc0" * 8)  # 2**32 - 1, as Z85 writes it
    assert not curve.is_key("%nSc1" + "%nSc0" * 7)


def test_files_have_their_modes_whatever_the_umask(tmp_path):
    pair = curve.new_pair()
    before = os.umask(0o000)
    try:
        curve.create_files(tmp_path, pair)
    finally:
        os.umask(before)

    secret, public = tmp_path / "peer.secret", tmp_path / "peer.public"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (secret, public)] == [0o600, 0o644]
    assert [path.read_text() for path in (secret, public)] == [
        f"{pair.secret}\n",
        f"{pair.public}\n",
    ]
    read = curve.read_pair(secret)
    assert isinstance(read, curve.KeyPair)
    assert (read.public, read.secret) == (pair.public, pair.secret)


@pytest.mark.parametrize("there", ["peer.secret", "peer.public"])
def test_nothing_is_written_where_one_file_is_there_already(tmp_path, there):
    (tmp_path / there).symlink_to(tmp_path / "nowhere")

    with pytest.raises(curve.KeyExists, match=there):
        curve.create_files(tmp_path, curve.new_pair())

    assert os.listdir(tmp_path) == [there]


def test_replaced_files_are_new_ones_of_the_same_modes(tmp_path):
    curve.create_files(tmp_path, curve.new_pair())
    pair = curve.new_pair()

    curve.replace_files(tmp_path, pair)

    read = curve.read_pair(tmp_path / "peer.secret")
    assert isinstance(read, curve.KeyPair)
    assert read.public == pair.public
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"peer.secret": 0o600, "peer.public": 0o644}
