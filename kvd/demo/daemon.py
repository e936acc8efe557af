"""``python -m kvd.demo.daemon serve ...``: ``kvd``, but it ends when the demo does, however.

A daemon must outlive whoever started it; that of a demo must not, even if the demo is killed
outright.
"""

from __future__ import annotations

from kvd.cli import main
from kvd.demo.parent import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    main()
