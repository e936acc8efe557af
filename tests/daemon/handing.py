"""Starts a command as systemd does: with descriptors from 3 on, and the variables that say so.

python handing.py NAME=stream:PATH NAME=seqpacket:PATH NAME=memory:BYTES -- COMMAND...
"""

from __future__ import annotations

import os
import socket
import sys

KINDS = {"stream": socket.SOCK_STREAM, "seqpacket": socket.SOCK_SEQPACKET}


def descriptor_of(kind: str, what: str) -> int:
    if kind == "memory":
        descriptor = os.memfd_create("stored", os.MFD_CLOEXEC)
        os.truncate(descriptor, int(what))
        return descriptor
    listener = socket.socket(socket.AF_UNIX, KINDS[kind])
    listener.bind(what)
    listener.listen(16)
    return listener.detach()


def main(words: list[str]) -> None:
    end = words.index("--")
    handed = [word.partition("=") for word in words[:end]]
    made = [descriptor_of(*value.split(":", 1)) for _, _, value in handed]
    high = [os.dup2(one, 100 + place) for place, one in enumerate(made)]
    for place, one in enumerate(high):
        os.dup2(one, 3 + place)
    os.environ |= {
        "LISTEN_PID": str(os.getpid()),
        "LISTEN_FDS": str(len(handed)),
        "LISTEN_FDNAMES": ":".join(name for name, _, _ in handed),
    }
    for one in high:
        os.close(one)
    os.execv(words[end + 1], words[end + 1 :])


if __name__ == "__main__":
    main(sys.argv[1:])
