"""Packages that an SGLang wants and that a machine without a GPU has not: empty modules for them.

Nothing of SGLang's own is played: what is run are its classes. What is here stands for kernels and
decoders that its modules import and that nothing of these tests calls.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

KERNELS = {"sgl_kernel", "flashinfer", "flash_attn", "kernels", "deep_gemm", "tilelang"}
DECODERS = {"torchvision"}


class EmptyKind(type):
    """A class that has whatever name it is asked for."""

    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0


class EmptyModule(types.ModuleType):
    """A module whose names are all such classes."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return EmptyKind(name, (), {})


class EmptyFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Behind all other finders: what is installed is what is imported."""

    def find_spec(self, name, path=None, target=None):
        """One of those, and nothing else."""
        if name.partition(".")[0] not in KERNELS | DECODERS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return EmptyModule(spec.name)

    def exec_module(self, module):
        pass


def stand_in() -> None:
    """From here on SGLang can be imported; transformers must not take them for there."""
    import transformers.image_utils  # noqa: F401
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()
    sys.meta_path.append(EmptyFinder())
