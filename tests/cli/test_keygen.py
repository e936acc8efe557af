"""``kvd keygen``: what it writes, prints and refuses."""

from __future__ import annotations

import stat

from click.testing import CliRunner

from kvd.cli import kvd
from kvd.config import Config, load
from kvd.curve import KeyPair, read_pair


def run(*arguments):
    done = CliRunner().invoke(kvd, ["keygen", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


def test_keygen_writes_both_files_and_prints_the_public_key_alone(tmp_path):
    status, out, err = run("--out", tmp_path / "keys")

    secret = tmp_path / "keys" / "peer.secret"
    pair = read_pair(secret)
    assert isinstance(pair, KeyPair)
    assert (status, err) == (0, "")
    assert out.splitlines()[2] == pair.public
    assert pair.secret not in out
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert (tmp_path / "keys" / "peer.public").read_text() == f"{pair.public}\n"


def test_keygen_prints_lines_that_the_configuration_takes(tmp_path, monkeypatch):
    monkeypatch.setenv("KVD_NODE__NAME", "node.7")
    _, out, _ = run("--out", tmp_path)
    file = tmp_path / "kvd.toml"
    file.write_text("\n".join(line for line in out.splitlines() if line.startswith("  ")))

    config = load(file, {"KVD_NODE__NAME": "node.7"}, ())

    assert isinstance(config, Config)
    assert config.peers.secret_key_file == str(tmp_path / "peer.secret")
    assert list(config.peers.keys) == ["node.7"]


def test_keygen_replaces_keys_only_by_force(tmp_path):
    run("--out", tmp_path)
    before = (tmp_path / "peer.secret").read_text()

    status, out, err = run("--out", tmp_path)
    assert (status, out) == (1, "")
    assert f"{tmp_path}/peer.secret is there already and was not touched; --force" in err
    assert (tmp_path / "peer.secret").read_text() == before

    assert run("--out", tmp_path, "--force")[0] == 0
    assert (tmp_path / "peer.secret").read_text() != before


def test_keygen_says_where_it_cannot_write(tmp_path):
    (tmp_path / "file").touch()

    status, out, err = run("--out", tmp_path / "file" / "keys")

    assert (status, out) == (1, "")
    assert "could not be written" in err
    assert "give --out DIR" in err
