"""A second dialect of S3 for the tests of a store: the server of moto, in a process of its own.

It keeps objects in memory, asks for no keys, and is one process: what wants volume servers or keys
that are refused is left out with it (``LACKS``). The program is ``moto_server`` on the path, or
``KVD_MOTO`` names it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Final
from urllib.parse import quote
from xml.etree import ElementTree

from kvd.harness.daemons import free_port
from kvd.harness.store import ASK_S, BUCKET, START_S

ABSENT: Final = "there is no moto here: pip install 'moto[server]', or name moto_server in KVD_MOTO"
LACKS: Final = {"keys": "moto refuses no keys", "volumes": "moto has no volume servers"}
SIGNED: Final = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, "
    "SignedHeaders=host, Signature=00"
}
"""That it is signed is looked at, by whom is not."""
_S3 = "{http://s3.amazonaws.com/doc/2006-03-01/}"


def moto() -> str | None:
    """The program; None where it is not installed."""
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return os.environ.get("KVD_MOTO") or shutil.which("moto_server", path=beside)


class MotoStore:
    """Its process, as ``SeaweedStore``; ``stop`` it in the end."""

    lacks = LACKS

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.s3_port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """As kvd.toml has it."""
        return f"http://127.0.0.1:{self.s3_port}"

    @property
    def credentials_file(self) -> Path:
        """The keys, as AWS's own tools have them."""
        return self.directory / "credentials"

    def start(self) -> None:
        """Return when objects can be written."""
        self.directory.mkdir(exist_ok=True)
        self.credentials_file.write_text(
            "[default]\naws_access_key_id = key\naws_secret_access_key = secret\n"
        )
        self.credentials_file.chmod(0o600)
        program = moto()
        assert program is not None, ABSENT
        with (self.directory / "moto.log").open("ab") as log:
            self._process = subprocess.Popen(
                [program, "-H", "127.0.0.1", "-p", str(self.s3_port)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": ""},
            )
        until_s = time.monotonic() + START_S
        while not self._is_up():
            if time.monotonic() > until_s:
                self.stop()
                raise RuntimeError(f"moto does not come up: see {self.directory}/moto.log")
            time.sleep(0.1)

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def freeze(self) -> None:
        """Let it be silent: its port takes connections, and nobody answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _is_up(self) -> bool:
        try:
            return self._ask("PUT", f"/{BUCKET}")[0] == 200
        except (OSError, HTTPException):
            return False

    # ---- what lies there -------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Of all objects of kvd."""
        found: list[str] = []
        after = ""
        while True:
            _, body = self._ask("GET", f"/{BUCKET}?list-type=2&start-after={quote(after, safe='')}")
            tree = ElementTree.fromstring(body)
            names = [key.text or "" for key in tree.iter(f"{_S3}Key")]
            found += [name for name in names if len(name.rpartition("/")[2]) == 40]
            if not names or tree.findtext(f"{_S3}IsTruncated") != "true":
                return sorted(found)
            after = names[-1]

    def get(self, name: str) -> bytes:
        """The bytes of one object."""
        return self._ask("GET", f"/{BUCKET}/{quote(name)}")[1]

    def put(self, name: str, data: bytes) -> None:
        """Another one in its place."""
        self._ask("PUT", f"/{BUCKET}/{quote(name)}", data)

    def delete(self, name: str) -> None:
        """One is gone."""
        self._ask("DELETE", f"/{BUCKET}/{quote(name)}")

    def _ask(self, method: str, path: str, data: bytes | None = None) -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", self.s3_port, timeout=ASK_S)
        with contextlib.closing(connection):
            connection.request(method, path, data, SIGNED)
            answer = connection.getresponse()
            return answer.status, answer.read()
