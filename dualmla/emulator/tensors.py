"""Torch tensors of the CPU in an emulated device's memory, and Triton kernels launched over them.

Launchers are asked what they would launch by handing them tensors on "meta" (`dualmla_kernels.target`): each stands for a
tensor that was placed on the device, and those that a launcher makes itself are memory that nobody has written. Kernels are
compiled by the Triton that is installed, which needs no GPU; nothing is interpreted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dualmla.emulator.elf import CodeObject, load_code_object
from dualmla.emulator.errors import NotEmulatedError
from dualmla.emulator.kernargs import pack_triton
from dualmla.emulator.launch import Device, Mode, Report
from dualmla.emulator.translate import translate
from dualmla_kernels.compiled import SHARED_BYTES, compile_launch
from dualmla_kernels.target import CHIPS, Launch, launches_on


@dataclass
class _Placed:
    """A storage on the device. `twin` on "meta" has its size; `host` is None for what a launcher made."""

    address: int
    twin: torch.Tensor
    host: torch.Tensor | None


@dataclass
class Tensors:
    """The tensors of one call on `device`. Views of one storage share its memory there."""

    device: Device
    _placed: dict[int, _Placed] = field(default_factory=dict)
    _twins: dict[int, torch.Tensor] = field(default_factory=dict)

    def place(self, tensor: torch.Tensor, *, written: bool = True, rows: int | None = None) -> torch.Tensor:
        """The twin on "meta" of a tensor of the CPU, whose storage is copied to the device.

        Arguments:
            written: False leaves the memory unwritten there: the kernels are to write it and must not read it.
            rows: what launchers are told of the first dimension of a dense tensor, of which no more than `tensor` is touched;
                None: its own. Kernels are compiled for the size that they are told.
        """
        storage, shape = tensor.untyped_storage(), (tensor.shape[0] if rows is None else rows, *tensor.shape[1:])
        base = self._twins.get(storage.data_ptr())
        if base is None:
            nbytes = storage.nbytes() if rows is None else math.prod(shape) * tensor.element_size()
            base = torch.empty(nbytes, dtype=torch.uint8, device="meta")
            host = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
            memory = self.device.memory
            address = memory.put(host.numpy()) if written else memory.allocate(storage.nbytes())
            self._placed[_key(base)] = _Placed(address, base, host)
            self._twins[storage.data_ptr()] = base
        return base.view(tensor.dtype).as_strided(shape, tensor.stride(), tensor.storage_offset())

    def address(self, twin: torch.Tensor) -> int:
        """Where a tensor on "meta" lies on the device."""
        found = self._placed.get(_key(twin))
        if found is None:
            found = _Placed(self.device.memory.allocate(twin.untyped_storage().nbytes()), twin, None)
            self._placed[_key(twin)] = found
        return found.address + int(twin.storage_offset()) * twin.element_size()

    def fetch(self) -> None:
        """Bring what kernels have written back to the CPU; memory that they never wrote keeps what it held there."""
        for placed in self._placed.values():
            if placed.host is not None and (size := placed.host.numel()):
                written = torch.from_numpy(self.device.memory.written(placed.address, size))
                data = torch.from_numpy(self.device.memory.read(placed.address, (size,), "u1"))
                placed.host.copy_(torch.where(written, data, placed.host))


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def run_triton(tensors: Tensors, launch: Launch, mode: Mode | None = None) -> Report:
    """Compile a launch over tensors on "meta" for the device, and run it there.

    Raises:
        NotEmulatedError: the code has something that is not emulated; nothing was run.
    """
    arch = tensors.device.arch
    kernel = compile_launch(launch, CHIPS[arch])
    code = _load(kernel.asm["hsaco"], kernel.metadata.name.lstrip("_"))
    check_emulated(code, kernel.metadata.shared)
    values = dict(zip(launch.kernel.arg_names, launch.args, strict=False)) | dict(launch.kwargs)
    x, y, z = (*launch.grid, 1, 1)[:3]
    grid = (x, y, z)
    signature: Mapping[str, str] = kernel.src.signature
    values = {name: tensors.address(value) if isinstance(value, torch.Tensor) else value for name, value in values.items()}
    return tensors.device.launch(
        code,
        grid=grid,
        block=64 * kernel.metadata.num_warps,
        kernarg=pack_triton(signature, values, grid),
        lds_bytes=kernel.metadata.shared,
        mode=mode,
    )


def run_launcher(
    arch: str,
    mode: Mode,
    launcher: Callable[..., None],
    *args: Any,
    written: Collection[str] = (),
    rows: Mapping[str, int] | None = None,
    **kwargs: Any,
) -> list[Report]:
    """What a launcher of our kernels does with tensors of the CPU, done on an emulated `arch`.

    Arguments:
        launcher: takes tensors of any device.
        written: names of the keyword arguments that the kernels write and must not read.
        rows: of keyword arguments by name, as of `Tensors.place`.

    Raises:
        NotEmulatedError: as `run_triton`; nothing was changed.
    """
    tensors = Tensors(Device(arch))
    rows = rows or {}

    def twin(value: Any, name: str = "") -> Any:
        return tensors.place(value, written=name not in written, rows=rows.get(name)) if isinstance(value, torch.Tensor) else value

    twins = [twin(value) for value in args]  # first: what is also read has been written
    named = {name: twin(value, name) for name, value in sorted(kwargs.items(), key=lambda item: item[0] in written)}
    with launches_on(CHIPS[arch]) as launches:
        launcher(*twins, **named)
    if not launches:  # an empty batch, which the launcher settles by itself
        launcher(*args, **kwargs)
    reports = [run_triton(tensors, launch, mode) for launch in launches]
    tensors.fetch()
    return reports


@functools.lru_cache(maxsize=64)
def _load(binary: bytes, name: str) -> CodeObject:
    return load_code_object(binary, name=name)


def check_emulated(code: CodeObject, lds_bytes: int) -> None:
    """Raise NotEmulatedError, with every reason, for code that the emulator can't run."""
    places: dict[str, list[str]] = {}
    for told in translate(code).unsupported.values():
        address, what = told.split(": ", 1)
        places.setdefault(what, []).append(address)
    reasons = [f"{what}, first at {at[0]}, in {len(at)} places" for what, at in places.items()]
    if code.descriptor.scratch_bytes:
        reasons.append(f"it spills {code.descriptor.scratch_bytes} bytes of a lane to scratch memory")
    if lds_bytes > SHARED_BYTES[code.arch]:
        reasons.append(f"it wants {lds_bytes} bytes of LDS, the chip has {SHARED_BYTES[code.arch]}")
    if reasons:
        raise NotEmulatedError(f"{code.name}, compiled for {code.arch}, can't be emulated: {'; '.join(reasons)}")
