"""Tensors that a kernel reads by the TMA unit: encoded once for each address, where Triton's own launch encodes at each launch.

What the unit is told of a tensor, its address, shape, strides and the box of a copy, is encoded by the driver into 128 bytes,
which a launch copies with the other arguments. Encoding reads nothing but these numbers, so that what was encoded stays right
whatever lies at the address: it is kept, and passed to a launcher that takes it as it is.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from triton.runtime.driver import driver

MOST = 1024
"""Addresses remembered of a box: a cache of latents a layer, and what the allocator hands out for queries."""


class Box:
    """A tensor of one shape, strides and dtype at any address, as a kernel copies from it.

    Arguments:
        descriptor: Triton's, of such a tensor on the device "meta".
    """

    def __init__(self, descriptor: Any) -> None:
        self._descriptor = descriptor
        self._encoded: dict[int, tuple[Any, list[Any]]] = {}

    @property
    def kind(self) -> tuple[Any, ...]:
        """What a kernel is compiled for."""
        box = self._descriptor
        return (type(box), box.base.dtype, *box.block_shape, getattr(box, "layout", None))

    @property
    def types(self) -> list[str]:
        """Of what stands for it in a launch: itself encoded, its shape and its strides."""
        rank = len(self._descriptor.shape)
        return ["nvTmaDesc", *["i32"] * rank, *["i64"] * rank]

    def of(self, tensor: torch.Tensor) -> Any:
        """Triton's descriptor of `tensor`."""
        return dataclasses.replace(self._descriptor, base=tensor)

    def encoded(self, tensor: torch.Tensor, metadata: Any) -> list[Any]:
        """What stands for `tensor` in a launch of a kernel that was compiled to `metadata` of the box."""
        address = tensor.data_ptr()
        found = self._encoded.get(address)
        if found is None or found[0] is not metadata:
            if len(self._encoded) >= MOST:
                self._encoded.clear()
            found = self._encoded[address] = metadata, _encode(self.of(tensor), metadata)
        return found[1]


def launcher_of_encoded(compiled: Any, boxes: Sequence[Box]) -> Any:
    """As `compiled.run` of Triton's `CompiledKernel`, but for its first arguments it takes what `Box.encoded` returns."""
    types = [kind for box in boxes for kind in box.types] + [*compiled.src.signature.values()][len(boxes) :]
    source = SimpleNamespace(signature=dict(enumerate(types)), constants={})
    return driver.active.launcher_cls(source, compiled.metadata._replace(tensordesc_meta=None))


def described(boxes: Sequence[Box], args: Sequence[Any]) -> list[Any]:
    """The arguments as Triton's own launch takes them: the first ones by descriptors."""
    return [*(box.of(tensor) for box, tensor in zip(boxes, args, strict=False)), *args[len(boxes) :]]


def _encode(descriptor: Any, metadata: Any) -> list[Any]:
    from triton.backends.nvidia.driver import make_tensordesc_arg  # not there in Triton for AMD

    taken = len(inspect.signature(make_tensordesc_arg).parameters)  # later versions hand it the launch's other arguments, unused
    encoded: list[Any] = make_tensordesc_arg(descriptor, metadata, *(None,) * (taken - 2))
    return encoded
