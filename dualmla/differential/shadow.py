"""Shadow mode: in production, a share of decodes runs again on a second backend, and the two results are compared.

    shadow = Shadow("triton", share=0.001, save=Path("divergences"))
    backend = shadow.watch(dualmla.select_backend(cfg))        # and on as before

On the engine's path nothing waits for the device: what a sampled call read is copied (a window of its requests, under a
byte limit), the second backend and the comparison run on a stream of their own, and one flag comes back whenever it is
ready. A divergence is judged in float64 on another thread, counted, logged, and saved as a repro.

A captured graph holds no code of ours. Of the decodes that are captured for a batch size, one is remembered, so that its
tensors stay where they are; it is sampled right after a replay, which `MLAGraphState.replayed` tells of (`DecodeGraphs` calls
it). All that a graph gets is a copy of the lengths beside it: a step may move them on before it ends.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dualmla.attention import MLAImpl
from dualmla.backends.base import BackendUnavailable, MLABackend
from dualmla.differential import repro
from dualmla.differential.machine import device_name, versions
from dualmla.differential.problems import Result
from dualmla.differential.snapshot import DecodeSeen, Snapshot, on_host
from dualmla.differential.verdict import Finding, Verdict
from dualmla.metadata import MLAMetadata
from dualmla.selection import backend_for_device, is_registered
from dualmla.testing import compare
from dualmla.validation import check_count

logger = logging.getLogger("dualmla")

MOST_PENDING = 2
"""Snapshots alive at a time."""

GROWTH = 256
"""Tokens that a request may have grown by since its length was last seen."""


@dataclass
class Counts:
    """What shadow mode has done. `skipped` says why calls that were due were not sampled."""

    calls: int = 0
    sampled: int = 0
    agreed: int = 0
    diverged: int = 0
    saved: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    """By backend: divergences in which float64 found it wrong. A divergence may have none: the screen is coarser."""


class _Captured(NamedTuple):
    """A captured batch: of a graph state, by its buffers, and a size."""

    buffers: int
    batch_size: int


@dataclass(frozen=True)
class _Pending:
    """A comparison under way, or (flag None) a divergence on its way to the host."""

    snapshot: Snapshot
    second: Result
    flag: torch.Tensor | None
    ready: Callable[[], bool]


class Shadow:
    """Watches decodes of one device; for one thread that calls.

    Arguments:
        second: the backend that runs again; where it fails, the call counts as skipped.
        share: of decodes to sample, 0 to 1.
        max_bytes: most that a snapshot takes, and most that is kept from being reused within captured graphs: where more batch
            sizes are captured than that holds a decode of, some in between are not sampled.
        per_second: most samples a second.
        save: directory for repros of divergences; None: they are counted and logged only.
        most_repros: files are not written after that many.
        seed: of the choice of calls and requests.

    Raises:
        ValueError: an argument is out of its range, or `second` is unknown.
    """

    def __init__(
        self,
        second: str = "triton",
        *,
        share: float = 0.001,
        max_bytes: int = 64 << 20,
        per_second: float = 1.0,
        save: Path | None = None,
        most_repros: int = 20,
        seed: int = 0,
    ) -> None:
        for name, number, most in (("share", share, 1.0), ("per_second", per_second, math.inf)):
            if not isinstance(number, int | float) or not 0 < number <= most:
                raise ValueError(f"{name} must be above 0{' and at most 1' if most == 1 else ''}, got {number!r}")
        if second != "auto" and not is_registered(second):
            raise ValueError(f"second must be auto or the name of a registered backend, got {second!r}")
        check_count("max_bytes", max_bytes, least=1)
        check_count("most_repros", most_repros)
        self.second, self.share, self.max_bytes, self.per_second = second, share, max_bytes, per_second
        self.save, self.most_repros = save, most_repros
        self.counts = Counts()
        self._random = random.Random(seed)
        self._countdown = self._gap()
        self._last = -math.inf
        self._pending: list[_Pending] = []
        self._captured: dict[_Captured, DecodeSeen] = {}
        self._layers: dict[_Captured, set[int]] = {}
        self._lengths: tuple[torch.Tensor, Callable[[], bool]] | None = None
        self._threads: list[threading.Thread] = []
        self._stream: torch.cuda.Stream | None = None
        self._primary = ""
        self._judging = threading.Lock()
        self._device_name = ""

    def watch(self, backend: type[MLABackend]) -> type[MLABackend]:
        """`backend`, with its decodes watched; its layers too."""
        shadow = self
        shadow._primary = backend.name

        class Watched(backend):  # type: ignore[valid-type, misc]
            @classmethod
            def get_impl_cls(cls) -> type[MLAImpl]:
                impl = backend.get_impl_cls()
                return type(impl.__name__, (impl,), {"ops": cls})

            @classmethod
            def mla_decode(cls, q: torch.Tensor, kv_cache: torch.Tensor, meta: MLAMetadata, softmax_scale: float, **rest: Any) -> None:
                backend.mla_decode(q, kv_cache, meta, softmax_scale, **rest)
                if _being_captured(q):
                    shadow._remember(DecodeSeen(q, kv_cache, meta, softmax_scale, **rest))
                elif shadow._due():
                    shadow._sample(DecodeSeen(q, kv_cache, meta, softmax_scale, **rest))

        Watched.__name__ = Watched.__qualname__ = backend.__name__
        return Watched

    def drain(self) -> Counts:
        """Wait for every comparison, and return the counts."""
        while self._pending:
            if self._stream is not None:
                self._stream.synchronize()
            self._collect()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        return self.counts

    def _gap(self) -> int:
        """Calls until the next sample: geometric, so that no rhythm of the engine hides anything."""
        return 1 + int(math.log(1 - self._random.random()) / math.log(1 - self.share)) if self.share < 1 else 1

    def _remember(self, call: DecodeSeen) -> None:
        """One decode a captured batch, each layer as likely as the next; a cache that comes again begins another capture."""
        buffers = call.meta.buffers
        if buffers is None:
            return
        key = _Captured(id(buffers), call.meta.num_reqs)
        if not any(key.buffers == other.buffers for other in self._layers):
            buffers.on_replay.append(lambda batch_size: self._replayed(_Captured(key.buffers, batch_size)))
        layers = self._layers.setdefault(key, set())
        if call.kv_cache.data_ptr() in layers:
            layers.clear()
        layers.add(call.kv_cache.data_ptr())
        if self._random.randrange(len(layers)) == 0:
            self._captured[key] = replace(call, seq_lens=call.meta.seq_lens.clone())
            self._thin_out()

    def _thin_out(self) -> None:
        """Within `max_bytes`: of two batch sizes that are near to each other the smaller one goes, so that all kinds are sampled."""
        while sum(call.held_bytes for call in self._captured.values()) > self.max_bytes:
            keys = sorted(self._captured, key=lambda key: key.batch_size)
            steps = [larger.batch_size / smaller.batch_size for smaller, larger in itertools.pairwise(keys)]
            del self._captured[keys[steps.index(min(steps))] if steps else keys[0]]

    def _replayed(self, key: _Captured) -> None:
        if key in self._layers and self._due():
            self._sample(self._captured.get(key))

    def _due(self) -> bool:
        """Whether the decode that has run is one to sample; nothing more is done for the others."""
        self.counts.calls += 1
        if self._pending:
            self._collect()
        self._countdown -= 1
        if self._countdown > 0:
            return False
        self._countdown = self._gap()
        return True

    def _sample(self, call: DecodeSeen | None) -> None:
        """Begin a comparison, if the limits let it; None: a decode in a graph whose tensors are not kept."""
        now = time.monotonic()
        if now - self._last < 1 / self.per_second:
            self.counts.skipped["rate"] += 1
        elif len(self._pending) >= MOST_PENDING:
            self.counts.skipped["pending"] += 1
        elif call is None:
            self.counts.skipped["graph not kept"] += 1
        elif call.meta.num_reqs and call.meta.max_query_len:
            self._last = now
            self._begin(call)

    def _begin(self, call: DecodeSeen) -> None:
        lengths = self._known_lengths(call)
        if lengths is None:
            self.counts.skipped["lengths unknown"] += 1
            return
        first = self._random.choice([i for i, n in enumerate(lengths) if n] or [0]) % call.meta.num_reqs
        tokens = (lengths[first] if first < len(lengths) else max(lengths)) + GROWTH
        room = self.max_bytes // max(call.request_bytes(tokens), 1)
        if room == 0:
            self.counts.skipped["size"] += 1
            return
        window = slice(first, min(first + room, call.meta.num_reqs))
        try:
            self._device_name = self._device_name or device_name(call.q.device)
            second = backend_for_device(call.q.device, self.second)
            snapshot = Snapshot.take(call, window, tokens)
            self._pending.append(self._compare(snapshot, second))
        except BackendUnavailable as refusal:
            self.counts.skipped[str(refusal)] += 1
            return
        except Exception as error:  # no room, or a second backend that fails: nothing that the engine's own decode should suffer from
            why = f"{self.second} failed: {type(error).__name__}: {error}"
            if why not in self.counts.skipped:
                logger.warning("shadow: no comparison of a decode, %s", why)
            self.counts.skipped[why] += 1
            return
        self.counts.sampled += 1
        while self._pending and not call.q.is_cuda:
            self._collect()

    def _known_lengths(self, call: DecodeSeen) -> list[int] | None:
        """The lengths of a batch not long ago, for the size of a snapshot; asks for newer ones without waiting."""
        known = self._lengths[0].tolist() if self._lengths and self._lengths[1]() else None
        if self._lengths is None or known is not None:
            lens = call.lengths
            if not lens.is_cuda:
                return [int(n) for n in lens.tolist()]
            self._lengths = (on_host(lens), _event())
        return known

    def _compare(self, snapshot: Snapshot, second: type[MLABackend]) -> _Pending:
        """Started on a stream of its own; the flag is on the host once `ready`."""
        if not snapshot.q.is_cuda:
            result = snapshot.run(second)
            return _Pending(snapshot, result, snapshot.differs(result).any(), lambda: True)
        self._stream = self._stream or torch.cuda.Stream(snapshot.q.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(snapshot.q.device))
        snapshot.used_on(self._stream)
        with torch.cuda.stream(self._stream):
            result = snapshot.run(second)
            return _Pending(snapshot, result, on_host(snapshot.differs(result).any()), _event())

    def _collect(self) -> None:
        """Look at what has ended."""
        pending, self._pending = self._pending, []
        for one in pending:
            if not one.ready():
                self._pending.append(one)
            elif one.flag is None:
                self._start_judging(one)
            elif bool(one.flag):
                self.counts.diverged += 1
                self._pending.append(self._bring_home(one))
            else:
                self.counts.agreed += 1

    def _bring_home(self, pending: _Pending) -> _Pending:
        """To the host, so that the judging thread need not speak to the device: that could break a capture of the engine's."""
        if self._stream is None:
            return replace(pending, flag=None)
        with torch.cuda.stream(self._stream):
            second = Result(on_host(pending.second.out), None if pending.second.lse is None else on_host(pending.second.lse))
            return _Pending(pending.snapshot.on_host(), second, None, _event())

    def _start_judging(self, pending: _Pending) -> None:
        thread = threading.Thread(target=self._judge, args=(pending,), name="dualmla-shadow", daemon=True)
        self._threads = [old for old in self._threads if old.is_alive()] + [thread]
        thread.start()

    def _judge(self, pending: _Pending) -> None:
        """On a thread of its own, one at a time: which of the two is wrong, said, counted and saved."""
        with self._judging:
            problem = pending.snapshot.problem()
            exact = problem.lay_out("cpu", poison=True).exact()
            other = replace(pending.snapshot, out=pending.second.out, lse=pending.second.lse)
            verdicts = []
            for name, snapshot in ((self._primary, pending.snapshot), (self.second, other)):
                comparison = compare(*snapshot.result(), exact, flashmla_gate=False)
                if comparison.failures:
                    self.counts.wrong[name] += 1
                    finding = Finding("accuracy", "; ".join(comparison.failures))
                    verdicts.append(Verdict("decode", problem.title, name, (finding,), (), comparison))
            told = "; ".join(f"{verdict.backend} is wrong: {verdict.findings[0].sentence}" for verdict in verdicts) or "both within budget"
            logger.warning("shadow: %s and %s diverge in decode %s: %s", self._primary, self.second, problem.title, told)
            if self.save is not None and verdicts and self.counts.saved < self.most_repros:
                self.counts.saved += 1
                place = pending.snapshot.seen.q.device.type
                made = {**versions(), "device": self._device_name, "found": "shadow mode"}
                try:
                    logger.warning("shadow: saved %s", repro.save(self.save, problem, verdicts[0], device=place, made=made))
                except (OSError, ImportError) as error:
                    logger.warning("shadow: nothing was saved to %s: %s", self.save, error)


def _being_captured(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _event() -> Callable[[], bool]:
    """Whether all work of the current stream up to here is done."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event.query
