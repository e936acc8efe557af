"""A unix socket of another host as one of this host, by a child ``ssh`` that forwards it.

ssh asks nothing (``BatchMode``): keys and hosts are those that it knows. What it says on its
standard error is the reason when it fails. It ends with the tunnel, and so does the directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from kvd.text import clean

if TYPE_CHECKING:
    from tui.endpoint import Remote

OPTIONS = (
    "ExitOnForwardFailure=yes",
    "BatchMode=yes",
    "ConnectTimeout=10",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
)
"""A host that is gone is noticed within 15 s; a port that cannot be forwarded at once."""
END_S = 2.0
MAX_LINES = 8
MAX_LINE = 300


def arguments(target: Remote, local_path: str) -> list[str]:
    """What ssh is called with."""
    options = [word for option in OPTIONS for word in ("-o", option)]
    port = ["-p", str(target.port)] if target.port else []
    host = f"{target.user}@{target.host}" if target.user else target.host
    return ["ssh", "-N", *options, *port, "-L", f"{local_path}:{target.path}", "--", host]


class _Child(asyncio.SubprocessProtocol):
    """Keeps the last lines that ssh said, and says when it has ended."""

    def __init__(self, ended: asyncio.Future[None]) -> None:
        self._ended = ended
        self._rest = b""
        self.lines: deque[str] = deque(maxlen=MAX_LINES)

    @override
    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *whole, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-MAX_LINE:]
        for line in whole:
            text = clean(line.decode(errors="replace").strip())[:MAX_LINE]
            if text:
                self.lines.append(text)

    @override
    def process_exited(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


class Tunnel:
    """``endpoint`` is there as soon as ssh has forwarded it; ``ended`` is done when ssh is gone."""

    def __init__(self, target: Remote, directory: Path) -> None:
        self.target = target
        self._directory = directory
        self._socket_path = directory / "admin.sock"
        self.endpoint = f"ipc://{self._socket_path}"
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._child = _Child(self.ended)
        self._transport: asyncio.SubprocessTransport | None = None

    @classmethod
    async def open(cls, target: Remote) -> Tunnel:
        """Start ssh. Where there is no ssh, the tunnel has ended already, and ``why`` says so."""
        made = cls(target, Path(tempfile.mkdtemp(prefix="kvd-tui-")))
        try:
            made._transport, _ = await asyncio.get_running_loop().subprocess_exec(
                lambda: made._child,
                *arguments(target, str(made._socket_path)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as exc:
            made._child.lines.append(f"ssh cannot be run: {exc.strerror}")
            made.ended.set_result(None)
        return made

    def why(self) -> str:
        """The reason that ssh gave last, and with what it ended."""
        nothing = f"{self.target.path} there has hung up, and ssh does not say why"
        cleaned = self._child.lines[-1] if self._child.lines else nothing
        code = self._transport.get_returncode() if self._transport is not None else None
        ended = f" (ssh ended with {code})" if code is not None else ""
        return f"{self.target.host}: {cleaned}{ended}"

    def forget(self) -> None:
        """What ssh said until now is not the reason for what comes."""
        self._child.lines.clear()

    async def close(self) -> None:
        """End ssh, and wait until it has; repeatable."""
        if self._transport is not None:
            with contextlib.suppress(ProcessLookupError):
                self._transport.terminate()
            try:
                async with asyncio.timeout(END_S):
                    await asyncio.shield(self.ended)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._transport.kill()
                await self.ended
            self._transport.close()
        self._transport = None
        shutil.rmtree(self._directory, ignore_errors=True)
