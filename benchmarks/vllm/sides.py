"""Child processes that hold an engine each, as the parent sees them: start one, have it serve, end it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

__all__ = ["WITHOUT", "Side", "SideError"]

WITHOUT = ("stock", "wide", "again")
"""Sides that are vLLM alone"""


class SideError(RuntimeError):
    """A child that ended, or gave no answer in time."""


class Side:
    """One engine in a process of its own.

    Args:
        name: ``stock``, ``kpolicy`` or another of `benchmarks.vllm.ladders`; those of `WITHOUT` have none of vLLM's
            plugins.
        model: folder of the model's config.
        arguments: further arguments of `benchmarks.vllm.child`.
        log: takes what the child prints besides answers.
        environment: variables besides this process's.
        module: what runs in the child.
    """

    def __init__(
        self, name: str, model: Path, arguments: list[str], log: TextIO, environment: dict[str, str] | None = None,
        module: str = "benchmarks.vllm.child",
    ) -> None:  # fmt: skip
        self.name = name
        variables = dict(os.environ) | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONUNBUFFERED": "1", "TQDM_MININTERVAL": "30",
        } | (environment or {})  # fmt: skip
        if name in WITHOUT:
            variables["VLLM_PLUGINS"] = ""  # an allow-list of no plugin
        else:
            variables.pop("VLLM_PLUGINS", None)
        command = [sys.executable, "-m", module, "--model", str(model), *arguments]
        self._child = subprocess.Popen(
            command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace",
        )  # fmt: skip
        self.pid = self._child.pid
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._tail: list[str] = []
        self._log = log
        self._ended = False
        self._tag = f"{model.name} {name}"
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith("RES "):
                self._answers.put(line[4:])
                continue
            self._tail = [*self._tail[-30:], line.rstrip()[:300]]
            self._log.write(f"[{self._tag}] {line[:1500].rstrip()}\n")
            self._log.flush()
        self._answers.put(None)

    def go(self) -> None:
        """Let the engine start; until then the child only imports."""
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which its answer will tell
            self._child.stdin.write("go\n")
            self._child.stdin.flush()

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """The child's next answer.

        Raises:
            SideError: it ended, or the time is over.
        """
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise SideError(f"{self._tag}: no answer in {timeout_s:.0f} s") from None
        if line is None:
            raise SideError(f"{self._tag} ended with {self._child.wait()}:\n" + "\n".join(self._tail))
        row: dict[str, Any] = json.loads(line)
        return row

    def ask(self, timeout_s: float, **order: Any) -> dict[str, Any]:
        """Send an order and wait for its answer."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(order) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            time.sleep(0.2)
        return self.answer(timeout_s)

    def kill(self) -> None:
        """Have the process end, without waiting for that."""
        self._child.kill()

    def end(self) -> None:
        """End the process, and wait until the device has its memory back."""
        if self._ended:
            return
        self._child.kill()
        self._child.wait()
        self._reader.join(5.0)  # something that the child started may hold the pipe
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None and not self._reader.is_alive():
                with suppress(OSError):
                    pipe.close()
        self._ended = True
        time.sleep(0.5)
