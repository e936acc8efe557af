"""The witness outlasts the process for as long as anything holds its memory map."""

from __future__ import annotations

import os
import subprocess
import sys

from kvd.transfer import mapping

_KEEPER = """
import os, sys
from kvd.transfer import mapping
mapping.keep_map(int(sys.argv[1]))
print(flush=True)
sys.stdin.read()
"""


def test_witness_is_gone_only_after_its_keeper():
    descriptor = mapping.create_witness()
    keeper = subprocess.Popen(
        [sys.executable, "-c", _KEEPER, str(descriptor)],
        pass_fds=(descriptor,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    keeper.stdout.readline()

    assert not mapping.is_map_gone(descriptor)
    keeper.communicate()
    assert mapping.is_map_gone(descriptor)
    assert mapping.is_map_gone(descriptor)

    os.close(descriptor)
