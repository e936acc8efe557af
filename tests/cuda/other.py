"""Another process that opens what this one shares: python -m tests.cuda.other VERB DEVICE HANDLE.

Says ``open``, then does what each line asks for: ``read N``, ``write N BYTE``, ``has_come``,
``close``.
"""

from __future__ import annotations

import ctypes
import sys

from kvd.device.cuda import CudaError, Runtime
from kvd.device.cuda_library import load


def say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def main(verb: str, device: int, handle: bytes) -> None:
    runtime = load()
    assert isinstance(runtime, Runtime), runtime
    try:
        opened = getattr(runtime, verb)(device, handle)
    except CudaError as exc:
        say(exc.name)
        return
    say("open")
    for line in sys.stdin:
        match line.split():
            case ["read", count]:
                found = ctypes.create_string_buffer(int(count))
                runtime.copy(ctypes.addressof(found), opened, int(count))
                say(found.raw.hex())
            case ["write", count, byte]:
                given = ctypes.create_string_buffer(bytes([int(byte)]) * int(count), int(count))
                runtime.copy(opened, ctypes.addressof(given), int(count))
                runtime.synchronize()
                say("written")
            case ["has_come"]:
                try:
                    say(runtime.has_come(opened))
                except CudaError as exc:
                    say(exc.name)
            case ["close"]:
                runtime.close(opened)
                say("closed")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3]))
