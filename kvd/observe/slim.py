"""structlog without rich, which it loads for coloured tracebacks wherever it finds it.

Nobody here asks it for one, and a daemon would pay 4 MB and 60 ms of its start. Without effect
where rich or structlog is loaded already.
"""

from __future__ import annotations

import sys

if "rich" in sys.modules or "structlog" in sys.modules:
    import structlog
else:
    sys.modules["rich"] = None  # type: ignore[assignment]  # what makes an import of it fail
    try:
        import structlog
    finally:
        del sys.modules["rich"]

__all__ = ["structlog"]
