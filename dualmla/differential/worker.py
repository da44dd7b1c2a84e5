"""Judging in another process, so that an abort, a segmentation fault or a hang of a backend is a finding like any other.

The parent sends problems through a pipe and waits for verdicts. At the other end a template process, which has
imported everything and touched no device, forks the child that judges, and forks the next one when it dies.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from dualmla.backends.base import BackendUnavailable
from dualmla.differential.problems.base import Problem
from dualmla.differential.verdict import Finding, Verdict
from dualmla.testing import poisoned_allocations

START_LIMIT = 120.0
"""Seconds for the child to import torch and the backend."""

END_LIMIT = 20.0
"""Seconds for the child to leave when nobody asks any more."""

STDERR_LINES = 12

MOST_KEPT = 1 << 30
"""Bytes of a GPU that a child keeps between problems."""


class WorkerFailed(RuntimeError):  # noqa: N818 - a state
    """The child could not start: the file to load fails, or the backend can't run on the device. Says why."""


class WorkerAbandoned(Exception):  # noqa: N818 - a state
    """The parent wants no more of this worker."""


class Worker:
    """A process that judges one backend.

    Arguments:
        backend: as in `mla_decode`.
        device: where cases run.
        load: Python files run first, such as one that calls `dualmla.register_backend`.
        limit: seconds a case may take before it counts as hanging.
        threads: of the CPU that the child's arithmetic may use; None: as libraries choose.

    Use as a context manager. `name` is the backend that None or "auto" stands for, known after entering.
    """

    def __init__(
        self,
        backend: str | None,
        device: str = "cpu",
        load: tuple[Path, ...] = (),
        limit: float = 120.0,
        threads: int | None = None,
    ) -> None:
        self.backend, self.device, self.load, self.limit, self.threads = backend, device, load, limit, threads
        self.name = backend or "auto"
        self._abandoned = False
        self._template: subprocess.Popen[bytes] | None = None
        self._pid = 0

    def __enter__(self) -> Worker:
        with self._unless_abandoned():
            self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def abandon(self) -> None:
        """End the child at once, from another thread: who waits for it gets `WorkerAbandoned`."""
        self._abandoned = True
        if self._template is not None:
            self._template.kill()  # first: it would fork another child
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    @contextlib.contextmanager
    def _unless_abandoned(self) -> Iterator[None]:
        """Within: what fails because of `abandon` is no failure."""
        try:
            yield
        except (EOFError, OSError, WorkerFailed) as error:
            if self._abandoned:
                raise WorkerAbandoned from error
            raise

    def judge(self, problem: Problem) -> Verdict:
        """`dualmla.differential.judge.judge` in the child.

        Raises:
            WorkerAbandoned: `abandon` was called.
        """
        with self._unless_abandoned():
            return self._judge(problem)

    def _judge(self, problem: Problem) -> Verdict:
        self._said = os.fstat(self._stderr.fileno()).st_size
        _send(self._to_child, problem)
        hangs = not self._from_child.poll(self.limit)
        if hangs:
            os.kill(self._pid, signal.SIGKILL)
        kind, message = _receive(self._from_child)
        if kind == "verdict":
            verdict: Verdict = message
            return verdict
        finding = Finding("crash", f"the process ended with {_ending(message)}{self._last_words()}")
        if hangs:
            finding = Finding("hang", f"no answer within {self.limit:g} s")
        self._await_child()
        return Verdict(problem.operation, problem.title, self.name, (finding,))

    def _start(self) -> None:
        if self._abandoned:
            raise WorkerAbandoned
        child_in, to_child = os.pipe()
        from_child, child_out = os.pipe()
        self._to_child, self._from_child = Connection(to_child, readable=False), Connection(from_child, writable=False)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self._said = 0
        self._template = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", f"from dualmla.differential.worker import serve; serve({child_in}, {child_out})"],
            env=self._environment(),
            pass_fds=(child_in, child_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            start_new_session=True,  # Ctrl-C is for the parent, which says what becomes of its children
        )
        os.close(child_in)
        os.close(child_out)
        try:
            _send(self._to_child, (self.backend, self.device, self.load))
            self._await_child()
        except WorkerFailed:
            self._stop()
            raise

    def _environment(self) -> dict[str, str]:
        threads = {} if self.threads is None else {"OMP_NUM_THREADS": str(self.threads)}
        return {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

    def _await_child(self) -> None:
        """A child is up, or can't be."""
        try:
            for expected in ("forked", "ready"):
                if not self._from_child.poll(START_LIMIT):
                    raise WorkerFailed(f"the worker did not start within {START_LIMIT:g} s{self._last_words()}")
                kind, message = _receive(self._from_child)
                if kind != expected:
                    raise WorkerFailed(message if kind == "unusable" else f"the worker ended with {_ending(message)}{self._last_words()}")
                if kind == "forked":
                    self._pid = message
                else:
                    self.name = message
        except EOFError:
            status = 0 if self._template is None else self._template.wait()
            raise WorkerFailed(f"the worker ended with {_ending(status)}{self._last_words()}") from None

    def _stop(self) -> None:
        if self._template is None:
            return
        self._to_child.close()  # the child reads its end and leaves, the template follows
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._template.wait(END_LIMIT)
        self._template.kill()
        self._template.wait()
        self._from_child.close()
        self._stderr.close()

    def _last_words(self) -> str:
        self._stderr.seek(self._said)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return ":\n" + "\n".join(lines[-STDERR_LINES:]) if lines else ""


def serve(receive: int, send: int) -> None:
    """The template: has everything imported and nothing started, and forks a child to judge whenever the last one died."""
    import dualmla.differential.judge  # noqa: F401 - what a child starts with

    with poisoned_allocations():  # torch imports a second's worth of modules when this is first asked for
        pass
    problems, verdicts = Connection(receive, writable=False), Connection(send, readable=False)
    order = _receive(problems)
    while True:
        child = os.fork()
        if child == 0:
            _judge_until_closed(problems, verdicts, *order)
            return
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if problems.poll():  # nobody sends before the last answer has come: the parent has closed its end
            return
        _send(verdicts, ("died", status))


def _judge_until_closed(problems: Connection, verdicts: Connection, backend: str | None, device: str, load: tuple[Path, ...]) -> None:
    from dualmla.differential.emulated import know
    from dualmla.differential.judge import judge
    from dualmla.selection import backend_for_device

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an abort is expected and reported; its core would take seconds to write
    _send(verdicts, ("forked", os.getpid()))
    logging.basicConfig(level=logging.ERROR)
    for path in load:
        try:
            runpy.run_path(str(path))
        except (Exception, SystemExit) as error:
            _send(verdicts, ("unusable", f"{path} can't be loaded: {type(error).__name__}: {error}"))
            return
    try:
        know(backend)
        name = backend_for_device(torch.device(device), backend).name
    except (ValueError, BackendUnavailable) as error:  # sentences for the user
        _send(verdicts, ("unusable", str(error)))
        return
    except Exception as error:
        _send(verdicts, ("unusable", f"{type(error).__name__}: {error}"))
        return
    _send(verdicts, ("ready", name))
    with contextlib.suppress(EOFError):
        while True:
            verdict = judge(_receive(problems), name, device)
            if torch.device(device).type == "cuda":
                _tidy_gpu()
            _send(verdicts, ("verdict", verdict))


def _tidy_gpu() -> None:
    """After a fault of the GPU nothing works in this process any more: it ends here, as on a CPU, and another one goes on."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    if torch.cuda.memory_reserved() > MOST_KEPT:
        torch.cuda.empty_cache()


def _send(pipe: Connection, message: Any) -> None:
    """By torch's own format: `Connection.send` would pass tensors by shared memory, which dies with its owner."""
    buffer = io.BytesIO()
    torch.save(message, buffer)
    pipe.send_bytes(buffer.getvalue())


def _receive(pipe: Connection) -> Any:
    return torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)


def _ending(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
