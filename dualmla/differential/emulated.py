"""The two backends on an emulated gfx942 or gfx950, over tensors of the CPU: `aiter-gfx942`, `triton-gfx942` and so on.

- triton: our launchers are asked what they would launch on the chip; Triton compiles it, and the machine code is run.
- aiter: our adapter calls the installed release of AITER as it does on a GPU: its own Python, its own code objects, its second
  stage as Triton compiles it. Persistent decodes, over float8 caches, are planned and put together by HIP code, which is restated
  (`emulator.aiter_plan`). What the backends of a GPU share (cache write, gather, merge) is ours, compiled and run too.

Every launch is noted in `instruments`. What can't be emulated is refused with the reason, before anything is run.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from dualmla.attention import MLAImpl
from dualmla.backends.aiter import AiterMLABackend, launch, prefill, probe, support
from dualmla.backends.aiter.signatures import Aiter
from dualmla.backends.base import BackendUnavailable, DecodeCall, PrefillCall
from dualmla.backends.kernels import KernelMLABackend
from dualmla.backends.triton import TritonMLABackend
from dualmla.config import FLOAT8_DTYPES, MLAConfig
from dualmla.differential import instruments
from dualmla.metadata import MLAMetadata
from dualmla.selection import is_registered, register_backend

if TYPE_CHECKING:
    from dualmla.emulator import Mode, Report

ARCHS = ("gfx942", "gfx950")
PREFILL_ARCHS = ("gfx950",)
"""Where AITER's prefill of these head dimensions is a code object of its release."""

MOST_CACHE_BYTES = 1 << 30

TURN = 4
"""Instructions that a wave executes before it is the next one's turn."""


def emulated_name(backend: str, arch: str) -> str:
    """What `know` calls a backend on an emulated chip.

    Raises:
        ValueError: it has none.
    """
    if arch not in ARCHS:
        raise ValueError(f"{arch!r} is not emulated; emulated are {' and '.join(ARCHS)}")
    if backend not in ("aiter", "triton"):
        raise ValueError(f"backend {backend!r} has no machine code for {arch}; aiter and triton have")
    return f"{backend}-{arch}"


def is_emulated(backend: str) -> bool:
    """Whether this is the name of a backend on an emulated chip."""
    return any(backend in _names(arch) for arch in ARCHS)


def know(backend: str | None) -> None:
    """Register the backends of an emulated chip with this process where `backend` is one of them; auto never picks them."""
    for arch in ARCHS:
        names = _names(arch)
        if backend not in names:
            continue
        for name, base in names.items():
            if is_registered(name):
                continue
            backend_cls: type[_Emulated] = type(base.__name__, (base,), {"name": name, "arch": arch})
            backend_cls.impl = type("EmulatedMLAImpl", (MLAImpl,), {"ops": backend_cls})
            register_backend(name, backend_cls)


def _names(arch: str) -> dict[str, type[_Emulated]]:
    return {emulated_name("aiter", arch): EmulatedAiter, emulated_name("triton", arch): EmulatedTriton}


class _Emulated(KernelMLABackend):
    """What both share: our launchers, asked on the chip, and what no emulated chip takes."""

    arch: ClassVar[str]
    impl: ClassVar[type[MLAImpl]]

    @classmethod
    def get_impl_cls(cls) -> type[MLAImpl]:
        return cls.impl

    @classmethod
    def not_supported_reasons(cls, cfg: MLAConfig | None, device: torch.device) -> list[str]:
        reasons = list(_obstacles())
        if device.type != "cpu":
            reasons.append(f"the tensors are on {device.type}; an emulated chip works on tensors of the CPU")
        return reasons if cfg is None else reasons + cls._float8_refusals(cfg.cache_dtype)

    @classmethod
    def decode_refusals(cls, call: DecodeCall) -> list[str]:
        return cls._cache_refusals(call.kv_cache_dtype, call.cache_bytes)

    @classmethod
    def prefill_refusals(cls, call: PrefillCall) -> list[str]:
        return []

    @classmethod
    def doubts(cls, call: DecodeCall | PrefillCall) -> list[str]:
        return []

    @classmethod
    def concat_and_cache_mla(
        cls, kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, *, k_scale: float | torch.Tensor
    ) -> None:
        """As `MLABackend.concat_and_cache_mla`."""
        cls._check_cache(kv_cache)
        cls._launched(KernelMLABackend.concat_and_cache_mla, kv_c, k_pe, kv_cache, slot_mapping, k_scale=k_scale)

    @classmethod
    def gather_kv_cache(
        cls,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens: torch.Tensor,
        seq_starts: torch.Tensor,
        out: torch.Tensor,
        *,
        k_scale: float | torch.Tensor,
    ) -> None:
        """As `MLABackend.gather_kv_cache`."""
        cls._check_cache(kv_cache)
        cls._launched(KernelMLABackend.gather_kv_cache, kv_cache, block_table, cu_seqlens, seq_starts, out=out, k_scale=k_scale)

    @classmethod
    def merge_attn_states(
        cls,
        out_a: torch.Tensor,
        lse_a: torch.Tensor,
        out_b: torch.Tensor,
        lse_b: torch.Tensor,
        *,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """As `MLABackend.merge_attn_states`."""
        cls._launched(KernelMLABackend.merge_attn_states, out_a, lse_a, out_b, lse_b, out=out, lse=lse)

    @classmethod
    def _float8_refusals(cls, dtype: torch.dtype) -> list[str]:
        wanted = support.FLOAT8[cls.arch]
        return [f"the cache is {dtype}; {cls.arch} computes with {wanted}"] if dtype in FLOAT8_DTYPES and dtype != wanted else []

    @classmethod
    def _cache_refusals(cls, dtype: torch.dtype, nbytes: int) -> list[str]:
        reasons = cls._float8_refusals(dtype)
        if nbytes > MOST_CACHE_BYTES:
            told = f"the cache has {nbytes / (1 << 30):.1f} GiB"
            reasons.append(f"{told}; an emulated chip takes {MOST_CACHE_BYTES >> 30} GiB at most, which is copied with each call")
        return reasons

    @classmethod
    def _check_cache(cls, kv_cache: torch.Tensor) -> None:
        if reasons := cls._cache_refusals(kv_cache.dtype, kv_cache.numel() * kv_cache.element_size()):
            raise BackendUnavailable(cls.name, reasons)

    @classmethod
    def _launched(cls, launcher: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """What a launcher of ours does, done on the chip. What goes by the names `out` and `lse` is written and not read."""
        from dualmla.emulator.tensors import run_launcher

        with cls._noted() as (mode, reports):
            reports.extend(run_launcher(cls.arch, mode, launcher, *args, written=("out", "lse"), **kwargs))

    @classmethod
    @contextlib.contextmanager
    def _noted(cls) -> Iterator[tuple[Mode, list[Report]]]:
        """Within, launches are to be run in the mode given and their reports listed.

        Raises:
            BackendUnavailable: the emulator met what it does not know.
        """
        from dualmla.differential.hazards import launched, stopped
        from dualmla.emulator import MemoryFaultError, Mode, NotEmulatedError, UnsupportedInstructionError

        reports: list[Report] = []
        try:
            yield Mode(turn=TURN, delayed=True, watch_lds=True) if instruments.is_instrumented() else Mode(turn=TURN), reports
        except (NotEmulatedError, UnsupportedInstructionError) as error:
            raise BackendUnavailable(cls.name, [str(error)]) from error
        except MemoryFaultError as error:
            instruments.note(stopped(error))
            raise
        finally:
            for report in reports:
                instruments.note(launched(report))


class EmulatedTriton(_Emulated, TritonMLABackend):
    """Our own kernels as Triton compiles them for the chip."""

    @classmethod
    def mla_decode(
        cls,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        meta: MLAMetadata,
        softmax_scale: float,
        *,
        causal: bool,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        k_scale: float | torch.Tensor,
        num_kv_splits: int | None,
    ) -> None:
        """As `MLABackend.mla_decode`; the plan is made on the chip too."""
        from dualmla_kernels.decode import mla_decode

        cls._launched(
            mla_decode, q, kv_cache, meta.block_table, meta.seq_lens, meta.qo_indptr, meta.max_query_len, softmax_scale,
            causal=causal, out=out, lse=lse, k_scale=k_scale, num_kv_splits=num_kv_splits,
        )  # fmt: skip

    @classmethod
    def mla_prefill(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        *,
        causal: bool,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """As `MLABackend.mla_prefill`."""
        cls._launched(
            TritonMLABackend.mla_prefill, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale,
            causal=causal, out=out, lse=lse,
        )  # fmt: skip


class EmulatedAiter(_Emulated, AiterMLABackend):
    """The installed release of AITER behind our adapter."""

    may_raise = False
    compute_units: ClassVar[int | None] = None
    """Of the chip that splits are planned for; None: all it has."""

    @classmethod
    def not_supported_reasons(cls, cfg: MLAConfig | None, device: torch.device) -> list[str]:
        if reasons := super().not_supported_reasons(None, device):
            return reasons
        aiter = _aiter(cls.arch)
        if isinstance(aiter, str):
            return [aiter]
        return [] if cfg is None else support.config_refusals(cfg, aiter.signature, cls.arch)

    @classmethod
    def decode_refusals(cls, call: DecodeCall) -> list[str]:
        shape = cls._shape(call)
        return super().decode_refusals(call) + (shape if isinstance(shape, list) else [])

    @classmethod
    def _shape(cls, call: DecodeCall) -> support.LaunchShape | list[str]:
        """How AITER is asked, or every reason why not."""
        return support.decode_shape(call, _release(cls.arch).signature, cls.arch)

    @classmethod
    def prefill_refusals(cls, call: PrefillCall) -> list[str]:
        if cls.arch not in PREFILL_ARCHS:
            return [f"AITER's prefill for {cls.arch} is C++ that is compiled on the user's machine; its release has no code object of it"]
        return support.prefill_refusals(call, _release(cls.arch))

    @classmethod
    def mla_decode(
        cls,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        meta: MLAMetadata,
        softmax_scale: float,
        *,
        causal: bool,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        k_scale: float | torch.Tensor,
        num_kv_splits: int | None,
    ) -> None:
        """As `MLABackend.mla_decode`."""
        from dualmla.emulator.aiter_release import running
        from dualmla_kernels.target import CHIPS

        call = DecodeCall.of(
            q, kv_cache, meta, kv_lora_rank=out.shape[2], causal=causal, return_lse=lse is not None, num_kv_splits=num_kv_splits
        )
        shape = cls._shape(call)
        if isinstance(shape, list):
            raise BackendUnavailable(cls.name, shape)
        with cls._noted() as (mode, reports), running(cls.arch, mode, reports):
            launch.decode(
                _release(cls.arch), shape, q, kv_cache, meta, softmax_scale, causal=causal, out=out, lse=lse, k_scale=k_scale,
                compute_units=cls.compute_units or CHIPS[cls.arch].processors, captured=False,
            )  # fmt: skip

    @classmethod
    def mla_prefill(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        *,
        causal: bool,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """As `MLABackend.mla_prefill`."""
        from dualmla.emulator.aiter_release import running

        attention = _release(cls.arch).attention
        reasons = cls.prefill_refusals(PrefillCall.of(q, v))
        if reasons or attention is None:
            raise BackendUnavailable(cls.name, reasons)
        with cls._noted() as (mode, reports), running(cls.arch, mode, reports):
            prefill.prefill(
                attention, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale,
                causal=causal, out=out, lse=lse,
            )  # fmt: skip


@functools.cache
def _obstacles() -> tuple[str, ...]:
    """Why no machine code can be compiled and run in this process, a sentence each."""
    needs = {"tinygrad": "emulator", "numba": "emulator", "numpy": "emulator", "triton": "cpu"}
    missing: dict[str, list[str]] = {}
    for package, extra in needs.items():
        if importlib.util.find_spec(package) is None:
            missing.setdefault(extra, []).append(package)
    obstacles = [
        f"{' and '.join(packages)} {'is' if len(packages) == 1 else 'are'} not installed, which running machine code needs; "
        f"install `dualmla[{extra}]`"
        for extra, packages in missing.items()
    ]
    if os.environ.get("TRITON_INTERPRET", "0") not in ("0", ""):
        obstacles.append("TRITON_INTERPRET is set, and Triton can't compile in such a process: unset it")
    return tuple(obstacles)


@functools.cache
def _aiter(arch: str) -> Aiter | str:
    """AITER imported as on a machine with that chip, or why not."""
    from dualmla.emulator.aiter_objects import AiterNotFoundError, find_code_objects
    from dualmla.emulator.aiter_release import emulate_second_stage, on_chip
    from dualmla.emulator.aiter_stand_ins import lay_out

    installed = probe.find_aiter()
    if isinstance(installed, str):
        return installed
    try:
        find_code_objects()
    except AiterNotFoundError as error:
        return str(error)
    if "aiter" in sys.modules:
        return "AITER is imported in this process already, and keeps to the chip that it found then"
    folder = Path(tempfile.mkdtemp(prefix="dualmla-emulated-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ.update(lay_out(folder, arch))
    found = probe.imported(installed)
    if isinstance(found, str):
        return found
    emulate_second_stage()
    if found.planner is None:
        return found
    return replace(found, planner=replace(found.planner, sizes=on_chip(found.planner.sizes, arch)))


def _release(arch: str) -> Aiter:
    found = _aiter(arch)
    if isinstance(found, str):
        raise BackendUnavailable(f"aiter-{arch}", [found])
    return found
