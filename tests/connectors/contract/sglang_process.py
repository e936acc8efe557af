"""SGLang's classes as an engine of the contract: run by SGLang's Python, ``... SOCKET``.

It imports SGLang once. For each connection it forks: that process is one engine, which takes a line
of JSON at a time and answers with one. In the midst of a request it says which step it has come to,
and waits for what is to become of it; whoever is killed there takes his engine with him. It ends
with its standard input.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import select
import signal
import socket
import sys
from unittest import mock

import torch

from kvd.client import KvdError
from kvd.connectors.sglang.page_store import PageStore
from tests.connectors.sglang.engine import KVD, PAGE, PlayedScheduler, host_of, mha_device

from kvd.connectors.sglang import backend  # isort: skip - behind what stands in for kernels

FOREIGN = 85
"""Another request's, in pages that this one has given away."""


class Aborted(BaseException):
    """The request is given up where it is."""


class Suite:
    """Whoever plays this engine, at the other end of the connection."""

    def __init__(self, connection) -> None:
        self._lines = connection.makefile("rw")
        self._said = []
        logger = logging.getLogger("kvd.connectors.sglang")
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self._said.append(record.getMessage())
        logger.addHandler(handler)

    def hear(self):
        line = self._lines.readline()
        if not line:
            os.kill(os.getpid(), signal.SIGKILL)
        heard = json.loads(line)
        for place, value in heard.pop("set", {}).items():
            module, _, name = place.rpartition(".")
            setattr(importlib.import_module(module), name, value)
        return heard

    def say(self, **told):
        said, self._said[:] = list(self._said), []
        self._lines.write(json.dumps({**told, "said": said}) + "\n")
        self._lines.flush()


class Engine(PlayedScheduler):
    """One request at a time; host pages that nobody needs any more are another one's at once."""

    def __init__(self, suite, socket_path, weights) -> None:
        self._suite, self._at, self._operation = suite, None, None
        self._weights, self._away = weights, set()
        self.is_aborted = False
        device = mha_device()
        extra = {**KVD, "kvd.endpoint": socket_path, "kvd.weights": weights}
        super().__init__(device, host_of(device, "page_first"), "dynamic", extra)

    def happens(self, step):
        """What is to happen at this step does, once; in whichever thread."""
        if step != self._at:
            return
        self._at = None
        self._suite.say(at=step)
        if self._suite.hear()["aborts"]:
            self.is_aborted = True
            if self._operation is not None:
                # As the tree does: its pages are free once no byte of them moves.
                self.controller.terminate_prefetch(self._operation)

    def answer(self, tokens, at):
        """How many tokens were loaded; None: it was aborted."""
        self._at, self.is_aborted = at, False
        tokens = tokens[: len(tokens) // PAGE * PAGE]
        with contextlib.suppress(Aborted), self._watched():
            return self._answer(tokens) * PAGE
        return None

    def _answer(self, tokens):
        n_loaded = self.load(tokens)
        self._step("computing")
        if self._at == "preempted":
            # What it has goes to another one; the tree asks for it again.
            self._step("preempted")
            n_loaded = self.load(tokens)
        if n_loaded < len(tokens) // PAGE:
            self.save(tokens, n_loaded)
        self._step("released")
        return n_loaded

    def _step(self, step):
        self.happens(step)
        if self.is_aborted:
            raise Aborted

    @contextlib.contextmanager
    def _watched(self):
        plain = PageStore._ordered

        def ordered(store, *args, **how):
            to_pages = how["to_pages"]
            if not to_pages:
                self.happens("held")
            order = plain(store, *args, **how)
            self.happens("saving" if to_pages else "loading")
            return order

        with mock.patch.object(PageStore, "_ordered", ordered):
            yield

    def load(self, tokens):
        """Prefetch; each page that came must have what is its own."""
        names = self.names(tokens)
        self._operation = operation = self.controller.prefetch("r", tokens, None, [])
        assert self.controller.prefetch_hit_queue.get(timeout=120) is operation
        self.happens("looking up")
        n_hits = len(operation.hash_value)
        n_pages = 0
        indices = None
        if n_hits and not self.is_aborted:
            indices = operation.host_indices = self._take(n_hits)
            self.controller.prefetch_buffer.put(operation)
            while not (ack := self.controller.ack_prefetch_queue.get(timeout=120)).completed_req:
                n_pages = ack.completed_tokens // PAGE
        self._operation = None
        if indices is not None:
            for number, name in enumerate(names[:n_pages]):
                page = self.host.get_data_page(int(indices[number * PAGE]))
                assert torch.equal(page, self.content(name)), "KV that is not its own"
            self._give_away(indices)
        if self.is_aborted:
            raise Aborted
        return n_pages

    def save(self, tokens, first):
        """As the tree backs up what was computed."""
        names = self.names(tokens)
        indices = self._take(len(names) - first)
        for number, name in enumerate(names[first:]):
            self.host.set_from_flat_data_page(int(indices[number * PAGE]), self.content(name))
        self.controller.write_storage(
            indices, tokens[first * PAGE :], names[first:], prefix_keys=names[:first]
        )
        self.controller.ack_backup_queue.get(timeout=120)
        self._give_away(indices)
        if self.is_aborted:
            raise Aborted

    def content(self, name):
        """It depends on all tokens and on the model."""
        seed = int(name[:12], 16) ^ int.from_bytes(self._weights.encode()[:6], "big")
        like = self.host.get_dummy_flat_data_page()
        drawn = torch.randint(0, 80, like.shape, generator=torch.Generator().manual_seed(seed))
        return drawn.to(like.dtype)

    # ---- host pages ------------------------------------------------------------------------------

    def _take(self, n_pages):
        indices = self.host.alloc(n_pages * PAGE)
        assert indices is not None, "host pages are lost"
        self.check_away()
        for index in indices.tolist()[::PAGE]:
            self._away.discard(index)
            self._fill(index, 0)
        return indices

    def _give_away(self, indices):
        self.host.free(indices)
        for index in indices.tolist()[::PAGE]:
            self._fill(index, FOREIGN)
            self._away.add(index)

    def _fill(self, index, value):
        like = self.host.get_dummy_flat_data_page()
        self.host.set_from_flat_data_page(index, torch.full_like(like, value))

    def check_away(self):
        """Nobody of this engine has written what it had given away."""
        wrong = [i for i in self._away if not bool((self.host.get_data_page(i) == FOREIGN).all())]
        assert not wrong, f"host pages {wrong} were written after they were given away"

    def settle(self):
        """Nothing is under way between two requests; and no page is lost."""
        self.check_away()
        assert self.host.available_size() == self.host.size, "host pages are lost"


class Serving:
    """One engine, until whoever plays it goes: what he may ask for, by name."""

    def __init__(self, connection) -> None:
        torch.set_num_threads(1)
        self.suite = Suite(connection)
        self._engine = None

    def run(self):
        while True:
            heard = self.suite.hear()
            deed = heard.pop("do")
            try:
                self.suite.say(**getattr(self, f"do_{deed}")(**heard))
            except KvdError as error:
                self.suite.say(refused=[error.code, str(error)])
            except Exception as error:  # noqa: BLE001 - whoever plays it has to hear of it
                self.suite.say(failed=f"{type(error).__name__}: {error}")

    def do_start(self, endpoint, weights, version):
        backend.sglang_version = version or backend.sglang_version
        self._engine = Engine(self.suite, endpoint, weights)
        return {"namespace": self._engine.storage._store().namespace}

    def do_answer(self, tokens, at):
        return {"found": self._engine.answer(tokens, at)}

    def do_names(self, tokens):
        return {"names": self._engine.names(tokens)}

    def do_settle(self):
        self._engine.settle()
        return {}

    def do_close(self):
        if self._engine is not None:
            self._engine.close()
        return {}


def main(path):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        while True:
            ready, _, _ = select.select([listening, sys.stdin], [], [])
            if sys.stdin in ready:
                os._exit(0)
            connection, _ = listening.accept()
            if not os.fork():
                listening.close()
                Serving(connection).run()
                os._exit(0)
            connection.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
