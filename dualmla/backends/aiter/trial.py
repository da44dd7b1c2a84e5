"""Trying AITER in a subprocess: the import and one small decode, under a time limit, without harm to a build.

The first import of AITER, and the first decode, may build extensions for minutes. Whoever kills such a build leaves its lock
behind, and every later import waits for that lock for ever. So a build that goes on is never killed; a lock that no process
holds open is told from one that is held (its owner keeps the file open while it builds).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

logger = logging.getLogger("dualmla")

DEFAULT_LIMIT = 600.0  # seconds; DUALMLA_PROBE_TIMEOUT
FIRST_WORD, NEXT_WORD = 10.0, 60.0  # seconds until something is said, and between sayings
GLANCE = 0.5  # seconds between looks at the child

CHILD = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from dualmla.backends.aiter.trial_child import main; main(*sys.argv[2:])"
WAITS_FOR = re.compile(r"waiting for baton release at (\S+)")

_left_building: list[subprocess.Popen[bytes]] = []  # kept, so that Python does not complain of a child it can't wait for


def run(package: Path, device: torch.device) -> str:
    """Import AITER and decode a small batch in a subprocess.

    Arguments:
        package: AITER's directory.
        device: the GPU to decode on.

    Returns:
        What went wrong, as the predicate of a sentence about AITER; empty when nothing did.

    Raises:
        ValueError: `DUALMLA_PROBE_TIMEOUT` is not a positive number of seconds.
    """
    limit = time_limit()
    directory = Path(tempfile.mkdtemp(prefix="dualmla-aiter-"))
    log, result = directory / "log", directory / "result"
    with log.open("wb") as stream:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, json.dumps(sys.path), str(result), str(device)],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    try:
        failure = _watch(child, log, package, limit)
    except BaseException:  # interrupted
        _end(child, package)
        raise
    if failure is None:
        failure = _outcome(child.returncode, result, log)
    if child.returncode is not None:
        shutil.rmtree(directory, ignore_errors=True)
    return failure


def time_limit() -> float:
    """Seconds that the trial may take: `DUALMLA_PROBE_TIMEOUT`.

    Raises:
        ValueError: it is not a positive number.
    """
    text = os.environ.get("DUALMLA_PROBE_TIMEOUT") or str(DEFAULT_LIMIT)
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    if not limit > 0:
        raise ValueError(f"DUALMLA_PROBE_TIMEOUT is {text!r}; it must be a positive number of seconds")
    return limit


def described(error: BaseException) -> str:
    """`RuntimeError: what it said`, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def held(lock: Path) -> bool:
    """Whether some process has the file open. True also where that can't be seen: on another system than Linux, another user's."""
    try:
        if os.getuid() not in (0, lock.stat().st_uid) or not Path("/proc/self/fd").exists():
            return True
    except FileNotFoundError:  # released this moment
        return True
    target = str(lock.resolve())
    for descriptors in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            if any(os.readlink(descriptor) == target for descriptor in descriptors.iterdir()):
                return True
    return False


def _locks(package: Path) -> list[Path]:
    folders = [package / "jit" / "build", Path.home() / ".aiter" / "jit" / "build"]
    if own := os.environ.get("AITER_JIT_DIR"):
        folders.insert(0, Path(own) / "build")
    return [lock for folder in folders for lock in sorted(folder.glob("lock_*"))]


def _watch(child: subprocess.Popen[bytes], log: Path, package: Path, limit: float) -> str | None:
    """Wait for the child; what went wrong, or None when it ended by itself."""
    begin = time.monotonic()
    next_word = FIRST_WORD
    suspect: Path | None = None
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=GLANCE)
            return None
        elapsed = time.monotonic() - begin
        waited_for = WAITS_FOR.findall(log.read_text(errors="replace"))
        lock = Path(waited_for[-1]) if waited_for else None
        if lock is not None and lock.exists() and not held(lock):
            if suspect == lock:  # twice in a row: not the moment between closing and removing it
                _end(child, package)
                return f"waits for a lock that no process holds, left by a build that was killed: remove {lock}"
            suspect = lock
        if elapsed > limit:
            return _end(child, package) or f"did not come up within {limit:g} s{_left_locks(package)}: {_last_words(log)}"
        if elapsed > next_word:
            logger.warning(
                "trying AITER in a subprocess, which may build its kernels: %.0f s of at most %.0f s; log: %s", elapsed, limit, log
            )
            next_word += NEXT_WORD


def _end(child: subprocess.Popen[bytes], package: Path) -> str:
    """Kill the child and what it started, unless a build goes on, which is then left to end; says so."""
    building = [lock for lock in _locks(package) if held(lock)]
    if building:
        _left_building.append(child)
        return f"is still being built (process {child.pid} goes on, lock {building[0]}): start again when it is done"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    return ""


def _left_locks(package: Path) -> str:
    stale = [str(lock) for lock in _locks(package) if not held(lock)]
    return f" (locks that no process holds are left by a build that was killed, remove them: {', '.join(stale)})" if stale else ""


def _outcome(returncode: int, result: Path, log: Path) -> str:
    """What a child that ended said; it writes its result as the last thing, so without one it was taken down."""
    if result.exists():
        return result.read_text()
    if returncode < 0:
        return f"takes the process down: {signal.Signals(-returncode).name} in its trial"
    return f"ends the process with code {returncode} in its trial: {_last_words(log)}"


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"
