"""The shapes that a user asks for on the command line."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dualmla.config import COMPUTE_DTYPES, FLOAT8_DTYPES
from dualmla.testing import DecodeCase, PrefillCase
from dualmla.testing.cases import short_dtype
from dualmla.testing.timed import DECODE_SEED, PREFILL_SEED, TIMED_GRIDS, TimedCase, ragged, timed_grid
from dualmla.validation import device_float8, float8_refusal

OPERATIONS = ("decode", "prefill")

MOST_HEADS, MOST_BATCH, MOST_LENGTH, MOST_PAGE = 1024, 65536, 1 << 24, 1 << 16
"""Beyond any use; what fits into the memory of a machine is found out there."""


@dataclass(frozen=True)
class Asked:
    """Options of the command line. Of the lists all combinations are timed; what is empty has a default of the operation and the device.

    Attributes:
        op: decode or prefill.
        batch: requests.
        kv: keys of a request: `4096`, or `1..8192` for as many lengths at random.
        query_len: new tokens of a request, as kv; a prefill has as many keys as queries where one of the two is not given.
        heads, page_size: as in `MLAConfig`.
        dtype: bf16, fp16, fp32 or torch's names.
        kv_dtype: of the cache: the same names, a float8 dtype, or fp8 for the device's flavour; empty: dtype.
    """

    op: str = ""
    batch: Sequence[int] = ()
    kv: Sequence[str] = ()
    query_len: Sequence[str] = ()
    heads: Sequence[int] = ()
    page_size: Sequence[int] = ()
    dtype: str = ""
    kv_dtype: str = ""


def asked_cases(asked: Asked, grid: str | None, device: torch.device) -> list[TimedCase]:
    """The cases of a grid, as far as `op` and `heads` go, or of the shapes that are asked for.

    Raises:
        ValueError: naming the option, its value and what is allowed.
    """
    if asked.op and asked.op not in OPERATIONS:
        raise ValueError(f"--op must be one of {', '.join(OPERATIONS)}, got {asked.op!r}")
    for option, numbers, most in (
        ("--batch", asked.batch, MOST_BATCH),
        ("--heads", asked.heads, MOST_HEADS),
        ("--page-size", asked.page_size, MOST_PAGE),
    ):
        for number in numbers:
            if not 1 <= number <= most:
                raise ValueError(f"{option} must be from 1 to {most}, got {number}")
    cases = _shapes(asked, device) if grid is None else _of_grid(asked, grid, device)
    memory = _memory(device)
    for timed in cases:
        if timed.least_bytes > memory:
            told = f"{timed.least_bytes / 2**30:.0f} GiB, {device} has {memory / 2**30:.0f} GiB"
            raise ValueError(f"--batch, --kv and --heads must fit into memory: {timed.group}, {timed.title} needs at least {told}")
    return cases


def _of_grid(asked: Asked, grid: str, device: torch.device) -> list[TimedCase]:
    if grid not in TIMED_GRIDS:
        raise ValueError(f"--grid must be one of {', '.join(TIMED_GRIDS)}, got {grid!r}")
    for name in ("batch", "kv", "query_len", "page_size", "dtype", "kv_dtype"):
        if getattr(asked, name):
            raise ValueError(f"--{name.replace('_', '-')} must not be given beside --grid: {grid} has shapes of its own")
    cases = timed_grid(grid, device)
    heads = dict.fromkeys(timed.case.num_heads for timed in cases)
    if unknown := [number for number in asked.heads if number not in heads]:
        raise ValueError(f"--heads must be one of {', '.join(map(str, heads))} beside --grid {grid}, got {unknown[0]}")
    found = [timed for timed in cases if asked.op in ("", timed.operation) and (not asked.heads or timed.case.num_heads in asked.heads)]
    if not found:
        raise ValueError(f"--op must be {cases[0].operation} beside --grid {grid}, got {asked.op!r}")
    return found


def _shapes(asked: Asked, device: torch.device) -> list[TimedCase]:
    dtype, small = _dtype("--dtype", asked.dtype or "bf16", COMPUTE_DTYPES), device.type == "cpu"
    if asked.op != "prefill":
        return _decodes(
            asked.batch or ((2,) if small else (1, 16, 64, 128)),
            asked.kv or (("512",) if small else ("4096",)),
            asked,
            dtype,
            _kv_dtype(asked.kv_dtype, dtype, device),
        )
    for option, given in (("--page-size", asked.page_size), ("--kv-dtype", asked.kv_dtype)):
        if given:
            raise ValueError(f"{option} is an option of --op decode: a prefill reads no cache")
    queries = asked.query_len or asked.kv or (("64",) if small else ("2048",))
    return _prefills(asked.batch or ((2,) if small else (1, 8)), queries, asked.kv if asked.query_len else (), asked.heads or (16,), dtype)


def _memory(device: torch.device) -> int:
    """Bytes that the device has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _decodes(
    batches: Sequence[int], keys: Sequence[str], asked: Asked, dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> list[TimedCase]:
    cases = []
    for new, page_size, num_heads in itertools.product(asked.query_len or ("1",), asked.page_size or (64,), asked.heads or (16,)):
        for batch, kv in itertools.product(batches, keys):
            title = f"{batch} x {kv}"
            case = DecodeCase(
                num_heads=num_heads,
                seq_lens=_lengths("--kv", kv, batch, DECODE_SEED),
                query_lens=_lengths("--query-len", new, batch, DECODE_SEED + 1),
                page_size=page_size,
                dtype=dtype,
                kv_cache_dtype=kv_dtype,
            )
            cases.append(TimedCase(title, case))
    return cases


def _prefills(
    batches: Sequence[int], queries: Sequence[str], keys: Sequence[str], heads: Sequence[int], dtype: torch.dtype
) -> list[TimedCase]:
    cases = []
    for num_heads, batch, new, kv in itertools.product(heads, batches, queries, keys or ("",)):
        query_lens = _lengths("--query-len" if keys else "--query-len or --kv", new, batch, PREFILL_SEED)
        key_lens = _lengths("--kv", kv, batch, PREFILL_SEED) if kv else ()
        title = f"{batch} x {new} over {kv}" if kv else f"{batch} x {new}"
        cases.append(TimedCase(title, PrefillCase(num_heads=num_heads, query_lens=query_lens, key_lens=key_lens, dtype=dtype)))
    return cases


def _lengths(option: str, text: str, count: int, seed: int) -> tuple[int, ...]:
    """`4096` or `1..8192` for each of `count` requests."""
    low, dots, high = text.partition("..")
    try:
        least, most = int(low), int(high if dots else low)
    except ValueError:
        least, most = 0, 0
    if not 1 <= least <= most <= MOST_LENGTH:
        raise ValueError(f"{option} must be a length from 1 to {MOST_LENGTH} such as 4096, or a range such as 1..8192, got {text!r}")
    return ragged(count, least, most, seed=seed) if dots else (least,) * count


def _kv_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype | None:
    if not name:
        return None
    if name == "fp8":
        return device_float8(device)
    found = _dtype("--kv-dtype", name, (dtype, *FLOAT8_DTYPES), "fp8, ")
    if refusal := float8_refusal(found, device):
        raise ValueError(f"--kv-dtype is {refusal}")
    return found


def _dtype(option: str, name: str, allowed: Sequence[torch.dtype], more: str = "") -> torch.dtype:
    names = {known: dtype for dtype in allowed for known in (short_dtype(dtype), str(dtype).removeprefix("torch."))}
    if name not in names:
        raise ValueError(f"{option} must be one of {more}{', '.join(names)}, got {name!r}")
    return names[name]
