"""For whole engines: what ``absent`` stands in for, in each process that SGLang starts.

What its engine calls for CPUs without AMX is torch's own; ``vllm``, whose kernels it would import
for the rest, and ``xgrammar``, of which nothing is asked here, are names with nothing behind.
"""

from __future__ import annotations

import importlib
import logging
import sys
import types
from typing import Any

from tests.connectors.sglang import absent


def stand_in_for_vllm() -> None:
    """Its logger, and a kernel that nothing calls here."""
    package, logger, kernels = (
        types.ModuleType(name) for name in ("vllm", "vllm.logger", "vllm._custom_ops")
    )
    package.__path__ = []
    logger.logger = logging.getLogger("vllm")
    kernels.rotary_embedding = None
    for module in (package, logger, kernels):
        sys.modules[module.__name__] = module


def stand_in_for_grammars() -> None:
    """What SGLang names as a kind of a field in its own messages is any."""
    absent.DECODERS.add("xgrammar")
    importlib.import_module("xgrammar").StructuralTag = Any


absent.stand_in()
stand_in_for_vllm()
stand_in_for_grammars()
