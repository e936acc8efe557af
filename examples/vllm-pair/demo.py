"""kvd with real vLLM on this machine: ``make demo-vllm``, or ``python demo.py`` beside a vLLM.

A conversation is answered by one vLLM alone, and then by a pair: two daemons (``prefill.toml``,
``decode.toml``), two vLLM (``engine.sh``) and one address for both (``proxy.sh``). In its middle
the daemon of the decode node is killed, and later the engine that prefills. It ends with 0 only if
every answer of the pair has the tokens of the vLLM alone. ``KVD_VLLM_PYTHON`` is the interpreter of
the environment with vLLM; left out, it is that of ``make setup-vllm``.

What it starts has a session of its own each, so that Ctrl-C reaches this process alone, which then
ends all of it; if it is killed outright, they are told to end by the kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kvd.client import KvdError
from kvd.harness.daemons import DaemonFailed, DaemonProcess, free_port, is_linked
from kvd.types import amount

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
SHM: Final = Path("/dev/shm")

START_S: Final = 300.0
"""A vLLM is there after 20 to 40 seconds, where nothing else computes."""
SOON_S: Final = 30.0
ASK_S: Final = 120.0
STOP_S: Final = 15.0
LOG_LINES: Final = 20

LAUNCH: Final = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n"  # PR_SET_PDEATHSIG
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


class Turn(NamedTuple):
    """What the user says, how long the answer is, and what is shown by it."""

    says: str
    shows: str
    answer_tokens: int = 24


class Answer(NamedTuple):
    """``tokens`` are those of the prompt and of the answer."""

    tokens: tuple[int, ...]
    prompt_tokens: int
    text: str
    took_s: float


class Row(NamedTuple):
    """One turn of the pair; bytes of KV as the daemon of the prefill node counted them."""

    turn: int
    shows: str
    prompt_tokens: int
    answer_tokens: int
    moved_bytes: int
    saved_bytes: int
    took_s: float
    is_equal: bool


class DemoFailed(Exception):
    """It could not be carried through; the message says why."""


DAEMON_KILLED, DAEMON_BACK = 4, 6
ENGINE_KILLED, ENGINE_BACK = 8, 10
"""Turns in or before which that is so."""


def page(name: str, n_words: int) -> str:
    """The beginning of a page of the documentation."""
    return " ".join((ROOT / "docs" / "concepts" / name).read_text("utf-8").split()[:n_words])


def script() -> list[Turn]:
    """The conversation, whose model says nothing: what it is about does not matter."""
    return [
        Turn("Who holds a page, and since when?", "all of the prompt moves"),
        Turn("And what is a lease?", "only what the decode node lacks"),
        Turn("What does the engine write there?", "the same"),
        Turn("Tell me of the daemon.", "decode daemon killed amid the answer", 64),
        Turn("What if it is not there?", "no decode daemon"),
        Turn("And when it comes back?", "decode daemon back, found by its engine"),
        Turn("What does it have?", "what it had cached before it was killed"),
        Turn(f"Read this: {page('quarantine.md', 900)}", "prefill engine killed amid the prompt"),
        Turn("Who has computed that?", "no prefill engine"),
        Turn("What was kept?", "a new prefill engine, the old KV"),
    ]


class Talk:
    """A conversation with whoever serves at a port: each turn sends all that was said before."""

    def __init__(self, port: int, folder: Path) -> None:
        self._url = f"http://127.0.0.1:{port}/v1/chat/completions"
        self._port = port
        self._folder = folder
        self._said = [{"role": "system", "content": page("pages.md", 500)}]

    def turn(
        self, number: int, turn: Turn, on_token: Callable[[], None] | None = None
    ) -> tuple[str, Callable[[], Answer]]:
        """What one would type, and the call that does it; ``on_token`` at the first of a stream."""
        self._said.append({"role": "user", "content": turn.says})
        asked = {
            "model": "tiny",
            "messages": self._said,
            "max_tokens": turn.answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "return_token_ids": True,
            "stream": on_token is not None,
        }
        file = self._folder / f"turn-{number}.json"
        file.write_text(json.dumps(asked, indent=1))
        curl = f"curl -sN {self._url} -H 'Content-Type: application/json' -d @{file}"

        def ask() -> Answer:
            began_s = time.monotonic()
            prompt, tokens, text = self._post(file.read_bytes(), on_token)
            self._said.append({"role": "assistant", "content": text})
            took_s = time.monotonic() - began_s
            return Answer((*prompt, *tokens), len(prompt), text, took_s)

        return curl, ask

    def _post(
        self, body: bytes, on_token: Callable[[], None] | None
    ) -> tuple[list[int], list[int], str]:
        """Token ids of the prompt and of the answer, and the text of that."""
        link = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ASK_S)
        with contextlib.closing(link):
            try:
                link.request("POST", self._url, body, {"Content-Type": "application/json"})
                response = link.getresponse()
                if response.status != 200:
                    raise DemoFailed(f"{self._url}: {response.status} {response.read()[:500]!r}")
                if on_token is None:
                    said = json.loads(response.read())
                    choice = said["choices"][0]
                    text = choice["message"]["content"]
                    return said["prompt_token_ids"], choice["token_ids"], text
                return _streamed(response, on_token)
            except (OSError, http.client.HTTPException) as error:
                raise DemoFailed(f"{self._url}: {error!r}") from error


def _streamed(
    response: http.client.HTTPResponse, on_token: Callable[[], None]
) -> tuple[list[int], list[int], str]:
    """As a whole answer; ``on_token`` is called when the first token is here."""
    prompt: list[int] = []
    tokens: list[int] = []
    text = ""
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise DemoFailed(f"the answer broke off: {event['error']}")
        prompt = event.get("prompt_token_ids") or prompt
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            is_first = not tokens
            tokens += choice.get("token_ids") or []
            if is_first and tokens:
                on_token()
    return prompt, tokens, text


class Server:
    """One script of this folder, and all that it starts: a session of their own."""

    def __init__(self, name: str, port: int, pair: Path, *command: str, **variables: str) -> None:
        """Not started yet; it says that it is ready at ``/health`` of its port."""
        self.name = name
        self._port = port
        self._command = command
        self._log = pair / f"{name}.log"
        kept = {key: value for key, value in os.environ.items() if not key.startswith("KVD_")}
        own = {"PAIR": str(pair), "PORT": str(port), "VLLM_RPC_BASE_PATH": str(pair)}
        self._environment = kept | own | variables
        self._process: subprocess.Popen[bytes] | None = None
        self._shared: set[Path] = set()

    def start(self) -> None:
        """Start it, anew if it has ended; ``wait_ready`` says when it serves."""
        command = [sys.executable, "-c", LAUNCH, "sh", *self._command]
        with self._log.open("ab") as sink:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                cwd=HERE,
                env=self._environment,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Return when it serves.

        Raises:
            DemoFailed: it has ended, or took longer.
        """
        wait_until(self._is_ready, lambda: self._failed("is not ready"), START_S)

    def _is_ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise DemoFailed(self._failed(f"has ended with {self._process.returncode}"))
        return said_at(self._port, "/health") is not None

    def _failed(self, what: str) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join([f"{self.name} {what}", *(f"  {self.name}| {line}" for line in lines)])

    def pids(self) -> list[int]:
        """Of every process of the session: engine cores and workers too."""
        return [] if self._process is None else session(self._process.pid)

    def ask_to_stop(self) -> None:
        """Ask it to end, and wait for nothing."""
        if self._process is not None:
            self._shared |= shared_memory(self.pids())
            self._process.terminate()

    def stop(self) -> None:
        """Wait for its end, and see that nothing of it is left. Repeatable."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
            self.kill()

    def kill(self) -> None:
        """``kill -9`` of all of it at once, as of a host that has no memory left."""
        if self._process is None:
            return
        self._shared |= shared_memory(self.pids())
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        wait_until(lambda: not self.pids(), lambda: f"{self.name} does not die", SOON_S)
        # Whoever is killed removes nothing, and vLLM kills its workers when it is asked to stop.
        for file in self._shared:
            file.unlink(missing_ok=True)
        self._shared.clear()


def end_daemon(daemon: DaemonProcess) -> None:
    """Stop it; its own processes end a moment after it."""
    leader = daemon.pid if daemon.is_running else 0
    daemon.stop()
    wait_until(
        lambda: not (leader and session(leader)),
        lambda: f"processes of {daemon.name} are still there",
        SOON_S,
    )


def session(leader: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ends meanwhile
            state, _, _, of = stat.read_text().rpartition(")")[2].split()[:4]
            if int(of) == leader and state != "Z":
                found.append(int(stat.parent.name))
    return found


def shared_memory(pids: Sequence[int]) -> set[Path]:
    """Files of shared memory that these processes have mapped, but for pools of daemons.

    By inode: a semaphore is mapped under a name that it had while it was made.
    """
    device = SHM.stat().st_dev
    of_shm = f"{os.major(device):02x}:{os.minor(device):02x}"
    mapped = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it ends meanwhile
            rows = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
            mapped |= {int(row[4]) for row in rows if row[3] == of_shm}
    return {SHM / entry.name for entry in os.scandir(SHM) if entry.inode() in mapped}


def said_at(port: int, path: str) -> bytes | None:
    """What a server says; None if it says nothing, or that it is not well."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    with contextlib.closing(link), contextlib.suppress(OSError, http.client.HTTPException):
        link.request("GET", path)
        response = link.getresponse()
        said = response.read()
        return said if response.status == 200 else None
    return None


def wait_until(is_so: Callable[[], bool], otherwise: Callable[[], str], within_s: float) -> None:
    """Look until it is so.

    Raises:
        DemoFailed: it took longer; ``otherwise`` says what.
    """
    deadline_s = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > deadline_s:
            raise DemoFailed(f"{otherwise()} after {within_s:.0f} s")
        time.sleep(0.02)


class Pair:
    """The two nodes: what is started, in a folder that is its own."""

    def __init__(self, folder: Path, python: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.daemons = tuple(self._daemon(name) for name in ("prefill", "decode"))
        self.prefill_daemon, self.decode_daemon = self.daemons
        self.decode_daemon.knows(self.prefill_daemon)
        ports = {name: free_port() for name in ("prefill", "decode", "alone")}
        self.alone_port = ports["alone"]
        self.prefill, self.decode, self.alone = (
            Server(f"vllm-{name}", ports[name], folder, "engine.sh", name, PYTHON=str(python))
            for name in ("prefill", "decode", "alone")
        )
        self.proxy = Server(
            "proxy",
            self.port,
            folder,
            "proxy.sh",
            PREFILL_PORT=str(ports["prefill"]),
            DECODE_PORT=str(ports["decode"]),
            KVD=str(Path(sys.executable).with_name("kvd")),
        )
        self.servers = (self.proxy, self.prefill, self.decode, self.alone)

    def _daemon(self, name: str) -> DaemonProcess:
        """Of its file here; sockets, ports and memory are those of this run."""
        memory = {"pool.directory": str(SHM / f"{self.folder.name}-{name}")}
        daemon = DaemonProcess(name, self.folder, memory, module="kvd.demo.processes")
        daemon.config_file = HERE / f"{name}.toml"
        return daemon

    def wait_attached(self, daemon: DaemonProcess) -> None:
        """Until the engine beside this daemon, which is one process, is in its session."""

        def is_attached() -> bool:
            return any(each.state == "attached" for each in daemon.snapshot().clients)

        wait_until(is_attached, lambda: f"no engine has come to daemon {daemon.name}", SOON_S)

    def wait_linked(self) -> None:
        """Until each daemon can send to the other."""
        for daemon in self.daemons:
            daemon.wait_for(lambda daemon=daemon: is_linked(daemon), "has no peer", SOON_S)  # type: ignore[misc]

    def wait_routed(self) -> None:
        """Until the proxy knows that both engines are there."""

        def is_up() -> bool:
            said = json.loads(said_at(self.port, "/health") or b"{}")
            return [each["state"] for each in said.get("engines", [])] == ["up", "up"]

        wait_until(is_up, lambda: "the proxy does not see both engines", SOON_S)

    def counted(self) -> tuple[int, int]:
        """Bytes that handoffs moved and saved, by the daemon of the prefill node."""
        page = self.prefill_daemon.metrics()
        moved = re.search(r'^kvd_handoff_bytes_total\{dir="sent"\} (\S+)', page, flags=re.M)
        saved = re.search(r'^kvd_handoff_bytes_saved_total\{dir="sent"\} (\S+)', page, flags=re.M)
        assert moved is not None
        assert saved is not None
        return int(float(moved[1])), int(float(saved[1]))

    def loaded(self) -> int:
        """Bytes that the prefill engine took from its daemon."""
        page = self.prefill_daemon.metrics()
        found = re.findall(r'^kvd_engine_copy_bytes_total\{.*way="load".*\} (\S+)', page, re.M)
        return int(sum(map(float, found)))

    def stop(self) -> None:
        """End all of it."""
        with contextlib.ExitStack() as steps:  # each is taken, whatever comes of another
            for daemon in self.daemons:
                memory = SHM / f"{self.folder.name}-{daemon.name}"
                steps.callback(shutil.rmtree, memory, ignore_errors=True)
                steps.callback(end_daemon, daemon)
            for server in self.servers:
                steps.callback(server.stop)
            for server in self.servers:
                server.ask_to_stop()


class Demo:
    """One run: what is said of it as it goes, and what came out."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._began_s = time.monotonic()
        self.rows: list[Row] = []
        self.notes: list[str] = []

    def say(self, what: str) -> None:
        """A line, with the time since the start."""
        print(f"[{time.monotonic() - self._began_s:4.0f} s] {what}", flush=True)

    def perform(self, python: Path) -> None:
        """All of it."""
        pair = self._pair
        self.say("two daemons start, and a small Llama with random weights is made")
        for daemon in pair.daemons:
            daemon.start()
        model = [str(python), str(HERE / "model.py"), str(pair.folder / "model")]
        made = subprocess.run(model, capture_output=True, text=True, check=False, timeout=START_S)
        if made.returncode:
            raise DemoFailed(f"model.py failed:\n{made.stderr[-2000:]}")
        for daemon in pair.daemons:
            daemon.wait_ready()
        pair.wait_linked()
        alone = self._answers_alone()
        self._start_pair()
        self._converse(alone)

    def _answers_alone(self) -> list[Answer]:
        """What one vLLM without kvd answers; it has ended then."""
        pair = self._pair
        self.say("one vLLM alone starts, to compare with")
        pair.alone.start()
        pair.alone.wait_ready()
        talk = Talk(pair.alone_port, pair.folder)
        answers = [talk.turn(number, turn)[1]() for number, turn in enumerate(script(), 1)]
        pair.alone.kill()
        self.say(f"it has answered {len(answers)} turns, and is gone")
        return answers

    def _start_pair(self) -> None:
        pair = self._pair
        self.say("two vLLM start, one beside each daemon, and kvd proxy before them")
        for server in (pair.prefill, pair.decode):
            server.start()
        for server in (pair.prefill, pair.decode):
            server.wait_ready()
        pair.proxy.start()
        pair.proxy.wait_ready()
        for daemon in pair.daemons:
            pair.wait_attached(daemon)
        pair.wait_routed()
        self.say("all of it serves")

    def _converse(self, alone: Sequence[Answer]) -> None:
        pair = self._pair
        talk = Talk(pair.port, pair.folder)
        for number, turn in enumerate(script(), 1):
            if number == DAEMON_BACK:
                self._bring_daemon_back()
            if number == DAEMON_BACK + 1:
                pair.wait_attached(pair.decode_daemon)
            if number == ENGINE_BACK:
                self._bring_engine_back()
            moved, saved = pair.counted()
            loaded = pair.loaded()
            on_token = self._kill_daemon if number == DAEMON_KILLED else None
            curl, ask = talk.turn(number, turn, on_token)
            self.say(f"turn {number}: {turn.shows}\n         {curl}")
            answer = self._killing_the_engine(ask) if number == ENGINE_KILLED else ask()
            now_moved, now_saved = pair.counted()
            row = Row(
                number,
                turn.shows,
                answer.prompt_tokens,
                len(answer.tokens) - answer.prompt_tokens,
                now_moved - moved,
                now_saved - saved,
                answer.took_s,
                answer.tokens == alone[number - 1].tokens,
            )
            self.rows.append(row)
            print(f"         {told(row)}\n         {answer.text[:90]} ...", flush=True)
            if number == ENGINE_KILLED:
                pair.prefill.start()  # beside the next turn, as whoever supervises it would
            if number == ENGINE_BACK:
                taken = amount(pair.loaded() - loaded)
                self.notes.append(f"The new prefill engine took {taken} of KV from its daemon.")

    def _kill_daemon(self) -> None:
        pid = self._pair.decode_daemon.pid
        self._pair.decode_daemon.kill()
        print(f"         first token is here: kill -9 {pid}, the decode daemon", flush=True)

    def _bring_daemon_back(self) -> None:
        pair = self._pair
        pair.decode_daemon.start()
        pair.decode_daemon.wait_ready()
        pair.wait_linked()
        cached = sum(each.cached_pages for each in pair.decode_daemon.snapshot().pools)
        self.say(f"the decode daemon is started again: {cached} pages are still cached")

    def _killing_the_engine(self, ask: Callable[[], Answer]) -> Answer:
        """The answer to a prompt whose prefill engine is killed when its daemon holds the lease."""
        pair = self._pair
        came: list[Answer | DemoFailed] = []

        def run() -> None:
            try:
                came.append(ask())
            except DemoFailed as error:
                came.append(error)

        def leases() -> dict[int, str]:
            return {each.id: each.owner for each in daemon.snapshot().leases}

        daemon = pair.prefill_daemon
        before = leases()  # of prompts that are kept for the decode node
        asking = threading.Thread(target=run)
        asking.start()
        wait_until(lambda: bool(leases().keys() - before or came), lambda: "no new lease", SOON_S)
        opened, pids = leases().keys() - before, pair.prefill.pids()
        pair.prefill.kill()
        killed_s = time.monotonic()
        was_open = not came
        print(f"         lease {opened} is open: kill -9 {pids}, the prefill engine")
        wait_until(lambda: not leases(), lambda: f"{leases()} are still there", SOON_S)
        print(f"         its daemon holds nothing {time.monotonic() - killed_s:.1f} s later")
        if not was_open:
            self.notes.append("The prompt was answered before its engine was dead.")
        asking.join(ASK_S)
        match came:
            case [Answer() as answer]:
                return answer
            case [DemoFailed() as error]:
                raise error
            case _:
                raise DemoFailed(f"no answer after {ASK_S:.0f} s")

    def _bring_engine_back(self) -> None:
        pair = self._pair
        self.say("the prefill engine was started again after it died; waiting for it")
        pair.prefill.wait_ready()
        pair.wait_attached(pair.prefill_daemon)
        pair.wait_routed()

    def report(self) -> int:
        """The table and the verdict; 0 if all is as it must be."""
        print("\nturn  prompt  answer   moved P-D       saved   took  tokens   what")
        for row in self.rows:
            print(
                f"{row.turn:4}  {row.prompt_tokens:6}  {row.answer_tokens:6}  "
                f"{amount(row.moved_bytes):>10}  {amount(row.saved_bytes):>10}  "
                f"{row.took_s:4.1f}s  {'equal' if row.is_equal else 'DIFFER':7}  {row.shows}"
            )
        print("prompt and answer in tokens; moved, saved: bytes of KV, as the daemons count them")
        for note in self.notes:
            print(note)
        if alone := computed_alone(self.rows):
            print(
                f"Turn {alone}: computed where it was decoded. On a busy machine that happens: no"
            )
            print("engine waits long for a daemon.")
        found = problems(self.rows, len(script()))
        if found:
            print("FAILED: " + "; ".join(found))
            return 1
        tokens = sum(row.answer_tokens for row in self.rows)
        print(
            f"OK: {tokens} tokens of {len(self.rows)} answers are those of one vLLM alone, over "
            "kill -9 of a daemon and of an engine; "
            f"{amount(sum(row.moved_bytes for row in self.rows))} of KV moved, "
            f"{amount(sum(row.saved_bytes for row in self.rows))} did not have to; "
            f"{time.monotonic() - self._began_s:.0f} s"
        )
        return 0


def told(row: Row) -> str:
    """A turn in a line."""
    return (
        f"{row.prompt_tokens} tokens of prompt, {amount(row.moved_bytes)} moved, "
        f"{amount(row.saved_bytes)} saved; {row.answer_tokens} tokens of answer after "
        f"{row.took_s:.1f} s, {'equal' if row.is_equal else 'OTHER THAN ALONE'}"
    )


def computed_alone(rows: Sequence[Row]) -> str:
    """The turns of which nothing was handed over, though both nodes were there."""
    away = {*range(DAEMON_KILLED, DAEMON_BACK + 1), *range(ENGINE_KILLED, ENGINE_BACK)}
    found = [row.turn for row in rows if not row.moved_bytes + row.saved_bytes]
    return ", ".join(str(turn) for turn in found if turn not in away)


def problems(rows: Sequence[Row], turns: int) -> list[str]:
    """What a run did not show; it must show all of it."""
    found = [
        f"turn {row.turn}: other tokens than one vLLM alone" for row in rows if not row.is_equal
    ]
    if len(rows) != turns:
        found.append(f"{len(rows)} of {turns} turns were answered")
    if not any(row.moved_bytes for row in rows):
        found.append("no KV was handed over: the engines computed everything")
    elif not any(row.saved_bytes for row in rows):
        found.append("nothing was saved: each prompt was moved in whole")
    return found


@contextlib.contextmanager
def opened(python: Path) -> Iterator[Pair]:
    """A pair, of which nothing is left afterwards; its logs are, if it failed."""
    # Wherever temporary files go else: the path of a socket has 107 bytes at most.
    folder = Path(tempfile.mkdtemp(prefix="kvd-vllm-", dir="/tmp"))
    pair = Pair(folder, python)
    has_failed = False
    try:
        yield pair
    except Exception:
        has_failed = True
        raise
    finally:
        # What stops is not to be stopped by a second Ctrl-C.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        pair.stop()
        if has_failed:
            print(f"logs: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder)


def main() -> int:
    """Run it, and say what came out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    stay = "when all is shown, leave everything running until Ctrl-C, to look and to ask"
    parser.add_argument("--stay", action="store_true", help=stay)
    asked = parser.parse_args()
    python = Path(os.environ.get("KVD_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
    if not python.exists():
        print(f"{python} is not there: run make setup-vllm first", file=sys.stderr)
        return 1
    # A signal to end unwinds, which ends what was started.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        with opened(python) as pair:
            demo = Demo(pair)
            demo.perform(python)
            status = demo.report()
            if asked.stay:
                admin = " and ".join(daemon.admin for daemon in pair.daemons)
                print(f"\nkvd status --connect ENDPOINT, with {admin}\nCtrl-C ends all of it")
                signal.pause()
    except (DemoFailed, DaemonFailed, KvdError, subprocess.TimeoutExpired) as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped, and nothing of it is left", file=sys.stderr)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
