"""Device memory: an arena whose every access is checked against what was allocated and written.

Addresses are fake 47-bit ones. A table maps 64-KiB pages of them to memory, so allocations can lie gigabytes apart
(32-bit offsets that wrap are then seen for what they are), with unmapped pages between. Each byte is OUTSIDE every
allocation (an access there stops the run), UNWRITTEN (a read is reported as a finding) or WRITTEN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dualmla.emulator import findings, state
from dualmla.emulator.errors import MemoryFaultError
from dualmla.emulator.jit import inlined, njit

BASE = 0x7E5500000000
PAGE_BITS = 16
PAGE = 1 << PAGE_BITS
SPAN = 64 << 30
"""Bytes of address space from BASE on."""
FIRST_BYTES = 8 << 20
"""Room that a memory begins with; the system gives what is touched of it alone."""

OUTSIDE, UNWRITTEN, WRITTEN = 0, 1, 2


class Arena(NamedTuple):
    """What compiled code sees: page number -> 1 + place in `data` in pages (0: not allocated), the bytes and 32-bit words, and
    each byte's status."""

    pages: NDArray[np.int32]
    data: NDArray[np.uint8]
    words: NDArray[np.uint32]
    status: NDArray[np.uint8]
    status_words: NDArray[np.uint32]


class Memory:
    """Allocation and host access. All sizes in bytes."""

    def __init__(self) -> None:
        self._pages = np.zeros(SPAN // PAGE, np.int32)
        self._data = np.zeros(FIRST_BYTES, np.uint8)
        self._status = np.zeros(FIRST_BYTES, np.uint8)
        self._used = 0
        self._next = BASE + PAGE

    def arena(self) -> Arena:
        return Arena(self._pages, self._data, self._data.view(np.uint32), self._status, self._status.view(np.uint32))

    def allocate(self, nbytes: int, *, address: int | None = None) -> int:
        """Reserve `nbytes` that read as NaN patterns until written; returns the address, a multiple of 64 KiB.

        `address` asks for a certain one (a multiple of 64 KiB inside the arena, not allocated yet).
        """
        count = max(1, -(-nbytes // PAGE))
        start = self._next if address is None else address
        page = (start - BASE) >> PAGE_BITS
        if start % PAGE or page < 0 or page + count > len(self._pages):
            raise MemoryFaultError(f"cannot allocate {nbytes} bytes at {start:#x}")
        if self._pages[page : page + count].any():
            raise MemoryFaultError(f"{start:#x} is allocated already")
        if address is None:
            self._next = start + (count + 1) * PAGE
        first = self._used
        self._grow((first + count) * PAGE)
        self._used += count
        self._pages[page : page + count] = np.arange(first + 1, first + count + 1)
        place = first * PAGE
        self._data[place : place + count * PAGE].view(np.uint32)[:] = state.POISON_MEMORY
        self._status[place : place + nbytes] = UNWRITTEN
        return start

    def put(self, array: ArrayLike, *, address: int | None = None) -> int:
        """Allocate and fill with the bytes of `array`; returns the address."""
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start = self.allocate(raw.size, address=address)
        place = self._place(start, raw.size)
        self._data[place : place + raw.size] = raw
        self._status[place : place + raw.size] = WRITTEN
        return start

    def read(self, address: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """A copy of what lies at `address`, whatever its status."""
        nbytes = int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
        place = self._place(address, nbytes)
        return np.asarray(self._data[place : place + nbytes].view(dtype).reshape(shape).copy())

    def written(self, address: int, nbytes: int) -> NDArray[np.bool_]:
        """Which of `nbytes` bytes at `address` have been written."""
        place = self._place(address, nbytes)
        return np.asarray(self._status[place : place + nbytes] == WRITTEN)

    def _place(self, address: int, nbytes: int) -> int:
        page = (address - BASE) >> PAGE_BITS
        if not 0 <= page < len(self._pages) or self._pages[page] == 0:
            raise MemoryFaultError(f"{address:#x} is not allocated")
        place = ((int(self._pages[page]) - 1) << PAGE_BITS) + (address - BASE) % PAGE
        if nbytes and (self._status[place : place + nbytes] == OUTSIDE).any():
            raise MemoryFaultError(f"{address:#x} .. {address + nbytes:#x} is not all allocated")
        return place

    def _grow(self, nbytes: int) -> None:
        if nbytes > self._data.size:
            size = max(nbytes, 2 * self._data.size)
            data, status = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
            data[: self._data.size], status[: self._status.size] = self._data, self._status
            self._data, self._status = data, status


@inlined
def locate(arena: Any, wave: Any, address: Any) -> Any:
    """Place of `address` in the arena's data, or -1 with the wave's error set."""
    offset = address - BASE
    page = offset >> PAGE_BITS
    if page < 0 or page >= arena.pages.size or arena.pages[page] == 0:
        wave.error, wave.error_address = state.E_OUTSIDE, address
        return -1
    return (np.int64(arena.pages[page]) - 1) << PAGE_BITS | (offset & (PAGE - 1))


@njit
def load_bytes(arena: Any, wave: Any, group: Any, record: Any, address: Any, size: Any) -> Any:
    """`load`, byte by byte: narrow, misaligned, or with something to report."""
    value, low = np.int64(0), np.int64(WRITTEN)
    for k in range(size):
        place = locate(arena, wave, address + k)
        if place < 0:
            return 0
        low = min(low, np.int64(arena.status[place]))
        value |= np.int64(arena.data[place]) << (8 * k)
    if low == OUTSIDE:
        wave.error, wave.error_address = state.E_OUTSIDE, address
    elif low == UNWRITTEN:
        findings.note(group, findings.UNWRITTEN_READ, record, -1, address)
    if address & (size - 1):
        findings.note(group, findings.MISALIGNED, record, -1, address)
    return value


@inlined
def load(arena: Any, wave: Any, group: Any, record: Any, address: Any, size: Any) -> Any:
    """The `size`-byte (1, 2 or 4) unsigned value at `address`. Misaligned accesses work, as they do under ROCm."""
    place = locate(arena, wave, address)
    if place < 0:
        return 0
    if size == 4 and address & 3 == 0 and arena.status_words[place >> 2] == 0x02020202:
        return np.int64(arena.words[place >> 2])
    return load_bytes(arena, wave, group, record, address, size)


@njit
def store_bytes(arena: Any, wave: Any, group: Any, record: Any, address: Any, size: Any, value: Any) -> Any:
    for k in range(size):
        place = locate(arena, wave, address + k)
        if place < 0:
            return
        if arena.status[place] == OUTSIDE:
            wave.error, wave.error_address = state.E_OUTSIDE, address
            return
        arena.data[place] = value >> (8 * k) & 255
        arena.status[place] = WRITTEN
    if address & (size - 1):
        findings.note(group, findings.MISALIGNED, record, -1, address)


@inlined
def store(arena: Any, wave: Any, group: Any, record: Any, address: Any, size: Any, value: Any) -> Any:
    """Write the low `size` bytes (1, 2 or 4) of `value`."""
    place = locate(arena, wave, address)
    if place < 0:
        return
    status = arena.status_words[place >> 2]
    if size == 4 and address & 3 == 0 and status in (0x02020202, 0x01010101):
        arena.words[place >> 2] = value
        arena.status_words[place >> 2] = 0x02020202
    else:
        store_bytes(arena, wave, group, record, address, size, value)


@inlined
def load_words(arena: Any, address: Any, count: Any, rows: Any, lane: Any) -> Any:
    """The common case in one go: `count` aligned words of one page, all of them written, into `rows[k, lane]`. False, and
    nothing done, if it is not that case."""
    offset = address - BASE
    page = offset >> PAGE_BITS
    if address & 3 or page < 0 or page >= arena.pages.size or (offset & (PAGE - 1)) + 4 * count > PAGE or arena.pages[page] == 0:
        return False
    word = ((np.int64(arena.pages[page]) - 1) << PAGE_BITS | (offset & (PAGE - 1))) >> 2
    for k in range(count):
        if arena.status_words[word + k] != 0x02020202:
            return False
    for k in range(count):
        rows[k, lane] = arena.words[word + k]
    return True
