"""ChildSession: a child process with a time limit and a memory limit, whose end in any way is a status and a reason."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Generator, Mapping
from typing import Any, Final

from convoy.compare.process_memory import resident_bytes
from convoy.errors import InputError
from convoy.measurement.processes.process import WorkerEndedError, WorkerProcess

MODULE: Final = "convoy.compare.child"

WATCH_S: Final = 0.2
"""How often a child's memory is looked at."""


class ChildFailedError(Exception):
    """The child could not do it: `status` and `reason` of its row."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class ChildSession:
    """One child.

    Args:
        hello: its first message.
        environment: variables to set for it.
        timeout_s: most seconds between two of its messages.
        memory_limit_bytes: most resident bytes; 0: no limit.
        turns: lock on the device; a child asks for it when it times something, and waits.
        deadline: `time.monotonic()` after which nothing is waited for.
    """

    def __init__(
        self,
        hello: Mapping[str, Any],
        environment: Mapping[str, str],
        *,
        timeout_s: float,
        memory_limit_bytes: int = 0,
        turns: threading.Lock | None = None,
        deadline: float = math.inf,
    ) -> None:
        self.timeout_s, self.memory_limit_bytes, self.deadline = timeout_s, memory_limit_bytes, deadline
        self._turns = turns if turns is not None else threading.Lock()
        self._has_turn = False
        self.stage = "start"
        self.started = time.perf_counter()
        self.startup_s = 0.0
        """Seconds from the start of the process until its framework was imported."""
        self._too_much = 0
        self._worker = WorkerProcess(hello, environment, MODULE)
        self._over = threading.Event()
        if memory_limit_bytes:
            threading.Thread(target=self._watch, daemon=True).start()

    @property
    def resident_bytes(self) -> int:
        """Resident bytes of the process."""
        return resident_bytes(self._worker.pid)

    def ask(self, message: Mapping[str, Any], name: str) -> Any:
        """Send a message and wait for the answer that has a field `name`."""
        self.stage = str(message.get("do", self.stage))
        self._worker.send(message)
        return self.wait_for(name)

    @contextlib.contextmanager
    def turn(self) -> Generator[None]:
        """Have the device for oneself: no other child chooses or times meanwhile."""
        with self._turns:
            yield

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message that is not answered."""
        self._worker.send(message)

    def wait_for(self, name: str) -> Any:
        """The field `name` of the first message that has one.

        Raises:
            ChildFailedError: it says that it failed, takes too long between two messages, uses too much memory, or has ended.
            InputError: it says that the user's input cannot be used.
        """
        try:
            while True:
                message = self._worker.receive(max(0.0, min(self.timeout_s, self.deadline - time.monotonic())))
                if "turn" in message:
                    self._take_turns(wanted=bool(message["turn"]))
                if "stage" in message:
                    if not self.startup_s:
                        self.startup_s = time.perf_counter() - self.started
                    self.stage = " ".join(str(message[key]) for key in ("stage", "setting") if key in message)
                if "failed" in message:
                    raise _failure(message["failed"])
                if name in message:
                    return message[name]
        except TimeoutError as error:
            raise ChildFailedError("timeout", f"{self.stage}: {error} (the limit)") from None
        except WorkerEndedError as error:
            raise self._ended(error) from None
        finally:
            self._take_turns(wanted=False)

    def end(self) -> None:
        """End the process, whatever it does; for the thread that talks with it."""
        self._over.set()
        self._worker.end()

    def kill(self) -> None:
        """Kill the process; for any thread. The one that talks with it learns that it has ended."""
        self._worker.kill()

    def _take_turns(self, *, wanted: bool) -> None:
        """Wait for the device and tell the child that it has it, or let go of it."""
        if wanted and not self._has_turn:
            self._turns.acquire()
            self._has_turn = True
            self._worker.send({"do": "go"})
        elif not wanted and self._has_turn:
            self._has_turn = False
            self._turns.release()

    def _ended(self, error: WorkerEndedError) -> ChildFailedError:
        if self._too_much:
            limit = in_words(self.memory_limit_bytes)
            return ChildFailedError("out_of_memory", f"{self.stage}: used more than the limit of {limit}")
        if error.killed:
            return ChildFailedError("out_of_memory", f"{self.stage}: killed (the system does so when memory is short)")
        return ChildFailedError("crashed", f"{self.stage}: {error}"[:4000])

    def _watch(self) -> None:
        while not self._over.wait(WATCH_S):
            used = resident_bytes(self._worker.pid)
            if used > self.memory_limit_bytes:
                self._too_much = used
                self._worker.kill()
                return


def in_words(size: int) -> str:
    """Bytes for people, in the largest unit that there is one of."""
    scale, unit = next(((s, u) for s, u in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if size >> s), (0, "B"))
    return f"{size / (1 << scale):.4g} {unit}"


def _failure(fields: Mapping[str, str]) -> Exception:
    if "argument" in fields:
        return InputError(fields["argument"], fields["value"], fields["expected"], fields["todo"])
    return ChildFailedError(fields["status"], fields["reason"])
