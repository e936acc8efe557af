"""``python -m kvd.recorder CONNECTION RING BASE [BEGIN]``: descriptors that were passed on."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Before anything is imported: already that must cost nobody else any time.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    from kvd.recorder.process import main

    connection, ring, base = map(int, sys.argv[1:4])
    main(connection, ring, base, *sys.argv[4:])
