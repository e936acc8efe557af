"""``kvd doctor``: whether peers prove who they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvd import curve
from kvd.cli import kvd
from kvd.cli.doctor import peers
from kvd.cli.doctor.finding import DoctorFinding, Severity, Subject
from kvd.config import load
from tests.cli.sentences import sentence_of

OTHER, THIRD = curve.new_pair(), curve.new_pair()


@pytest.fixture
def secret(tmp_path):
    curve.create_files(tmp_path, curve.new_pair())
    return tmp_path / "peer.secret"


def found(*sets: str) -> dict[str, DoctorFinding]:
    config = load(Path(os.devnull), {}, ["node.name=me", *sets])
    assert not isinstance(config, list), config
    return {one.check: one for one in peers.peer_keys(Subject(config, {}))}


def test_loopback_without_keys_is_good_and_says_what_it_means():
    assert found() == {
        "peers": DoctorFinding(
            "peers",
            Severity.GOOD,
            "without keys, on loopback only: any user of this host may be any node",
        )
    }


def test_insecure_is_poor_with_the_way_out():
    finding = found("peers.insecure=true")["peers"]

    assert finding.severity is Severity.POOR
    assert finding.what.startswith("neither authenticated nor encrypted")
    assert "kvd keygen" in finding.fix


def test_keys_are_shown_with_their_file_and_the_listed_peers(secret):
    own = (secret.parent / "peer.public").read_text().strip()
    sets = [f"peers.keys.me={own}", f"peers.keys.p={OTHER.public}", f"peers.keys.q={THIRD.public}"]

    findings = found(f"peers.secret_key_file={secret}", *sets)

    assert [one.severity for one in findings.values()] == [Severity.GOOD] * 3
    assert findings["peer key"].what == f"{secret}, mode 0600, public key {own}"
    assert findings["peers"].what == sentence_of(
        "keys are shown with their file and the listed peers"
    )
    assert secret.read_text().strip() not in repr(findings)


def test_nobody_listed_is_poor(secret):
    finding = found(f"peers.secret_key_file={secret}")["peers"]

    assert (finding.severity, finding.what) == (
        Severity.POOR,
        "peers.keys lists no other node, so nobody can connect",
    )


def test_a_key_that_peers_allow_shuts_out_is_poor(secret):
    sets = [f"peers.keys.p={OTHER.public}", f"peers.keys.q={THIRD.public}", "peers.allow=p"]

    finding = found(f"peers.secret_key_file={secret}", *sets)["peers.allow"]

    assert finding.severity is Severity.POOR
    assert finding.what.startswith("q: has a key, and is refused")


def test_a_directory_where_anyone_may_put_another_key_is_wrong(secret):
    secret.parent.chmod(0o777)

    finding = found(f"peers.secret_key_file={secret}")["peer key directory"]

    assert finding.severity is Severity.WRONG
    assert finding.fix == f"chmod o-w {secret.parent}"


def test_doctor_names_the_peer_that_has_no_key(secret, tmp_path):
    file = tmp_path / "kvd.toml"
    file.write_text(
        f'[peers]\nsecret_key_file = "{secret}"\n[peers.connect]\np = "tcp://127.0.0.1:1"\n'
    )

    done = CliRunner().invoke(kvd, ["doctor", "--quick", "--config", str(file)])

    assert done.exit_code == 1
    assert "peers.connect.p" in done.stdout
    assert "has no key in peers.keys" in " ".join(done.stdout.split())
