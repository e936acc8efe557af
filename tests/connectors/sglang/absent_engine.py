"""For whole engines: what ``absent`` stands in for, in each process that SGLang starts.

What its engine calls for CPUs without AMX is torch's own; ``vllm``, whose kernels it would import
for the rest, is a name with nothing behind it.
"""

from __future__ import annotations

import logging
import sys
import types

from tests.connectors.sglang.absent import stand_in


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


stand_in()
stand_in_for_vllm()
