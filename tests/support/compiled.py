"""Whether the core that is tested is compiled, and the tests that cannot be asked of it then."""

from __future__ import annotations

import pytest

import kvd.core.node

IS_COMPILED = not str(kvd.core.node.__file__).endswith(".py")

replaces_methods = pytest.mark.skipif(
    IS_COMPILED, reason="it replaces methods of the core, which compiled code would not call"
)
"""For a test that plants a fault or counts calls by a method of its own."""
