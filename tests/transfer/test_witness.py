"""The witness outlasts the process for as long as anything holds its memory map."""

from __future__ import annotations

import os
import subprocess
import sys

from kvd.transfer import witness

_KEEPER = """
import os, sys
from kvd.transfer import witness
witness.keep(int(sys.argv[1]))
print(flush=True)
sys.stdin.read()
"""


def test_witness_is_gone_only_after_its_keeper():
    descriptor = witness.create()
    keeper = subprocess.Popen(
        [sys.executable, "-c", _KEEPER, str(descriptor)],
        pass_fds=(descriptor,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    keeper.stdout.readline()

    assert not witness.is_gone(descriptor)
    keeper.communicate()
    assert witness.is_gone(descriptor)
    assert witness.is_gone(descriptor)

    os.close(descriptor)
