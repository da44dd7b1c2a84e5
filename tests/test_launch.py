"""Launching again what was launched before: told apart as Triton tells it apart, and launched with what Triton launches with.

A driver of no GPU stands in for a real one: kernels are compiled, what would be launched is written down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from dualmla_kernels import boxes, decode, decode_config, prefill, ready
from dualmla_kernels import launch as launching
from dualmla_kernels.boxes import Box
from dualmla_kernels.launch import Prepared, launch, layout_of
from dualmla_kernels.plan import SplitPlan
from dualmla_kernels.ready import sort
from dualmla_kernels.target import CHIPS

GFX942, SM_90 = GPUTarget("hip", "gfx942", 64), GPUTarget("cuda", 90, 32)
DEVICE = torch.device("cuda", 0)


@triton.jit
def scale_rows(x_ptr, y_ptr, factor, rows, stride, SIZE: tl.constexpr, ADD: tl.constexpr = 1):
    on = tl.arange(0, SIZE)
    for r in range(rows):
        x = tl.load(x_ptr + r * stride + on)
        if y_ptr is not None:
            tl.store(y_ptr + r * stride + on, x * factor + ADD)


@triton.jit
def constant_first(SIZE: tl.constexpr, x_ptr):
    tl.store(x_ptr + tl.arange(0, SIZE), 0.0)


@triton.jit
def copy_box(from_desc, to_ptr, row, SIZE: tl.constexpr):
    on = tl.arange(0, SIZE)
    tl.store(to_ptr + on[:, None] * SIZE + on[None, :], from_desc.load([row, 0]))


class Recorder:
    """In place of Triton's driver of a GPU: what would be launched, and encoded for a TMA unit."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.encoded: list[tuple[Any, ...]] = []
        self.plain = 0
        self.utils = self
        self.target = GFX942

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 1234 + device

    def get_current_target(self) -> GPUTarget:
        return self.target

    def fill_tma_descriptor(self, address: int, *rest: Any) -> tuple[Any, ...]:
        self.encoded.append((address, *rest))
        return self.encoded[-1]

    fill_tma_descriptor_tiled = fill_tma_descriptor  # its name in later versions

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}

    def load_binary(self, *args: Any) -> tuple[Any, ...]:
        return object(), object(), 0, 0, 1024

    def unload_module(self, module: object) -> None:
        pass

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """What Triton makes of a kernel: called with grid, stream, function, its metadata, that of the launch, two hooks, arguments."""
        constants = {path[0] for path in source.constants}

        def run(
            x: int, y: int, z: int, stream: int, function: Any, packed: Any, launch_metadata: Any, enter: Any, leave: Any, *args: Any
        ) -> None:
            given = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]
            passed = [value for i, value in enumerate(given) if i not in constants]
            self.launches.append((x, y, z, stream, function, packed, len(args), *passed))

        return run


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """The driver, an empty memory of launches, and a count of those that went Triton's way."""
    recorder, run = Recorder(), triton.JITFunction.run

    def counted(*args: Any, **kwargs: Any) -> Any:
        recorder.plain += 1
        return run(*args, **kwargs)

    monkeypatch.setattr(triton.JITFunction, "run", counted)
    monkeypatch.setattr(launching, "_ready", {})
    monkeypatch.setattr(torch.cuda, "current_device", recorder.get_current_device)
    triton.runtime.driver.set_active(recorder)
    yield recorder
    launching._ready.clear()
    for kernel in (scale_rows, constant_first, copy_box):
        kernel.device_caches.clear()  # kernels are unloaded by the driver that loaded them
    triton.runtime.driver.set_active(None)


def call(*args: Any, kernel: Any = scale_rows, grid: tuple[int, ...] = (3,), **kwargs: Any) -> None:
    launch(kernel, grid, DEVICE, *args, **({"SIZE": 64, "num_warps": 4} | kwargs))


def test_the_second_launch_is_triton_s(recorder: Recorder) -> None:
    """The same kernel with the same arguments, on the current stream, with this launch's grid."""
    x, y = torch.zeros(2, 64), torch.zeros(2, 64)
    call(x, y, 0.5, 2, 64)
    call(x, y, 0.5, 2, 64)
    assert recorder.plain == 1
    first, second = recorder.launches
    assert second == first
    assert first[:4] == (3, 1, 1, 1234)
    assert first[6:] == (7, x.data_ptr(), y.data_ptr(), 0.5, 2, 64)
    call(y, x, 0.25, 7, 48, grid=(5, 2))
    assert recorder.plain == 1
    assert recorder.launches[-1] == (5, 2, 1, *first[3:7], y.data_ptr(), x.data_ptr(), 0.25, 7, 48)


def test_what_compiles_differently_is_launched_by_triton_first(recorder: Recorder) -> None:
    x = torch.zeros(3, 64)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, x, 0.5, 2, 64), {}),
        ((x, None, 0.5, 2, 64), {}),
        ((x[:, 1:], x, 0.5, 2, 64), {}),
        ((x.bfloat16(), x, 0.5, 2, 64), {}),
        ((x, x, 0.5, 2, 65), {}),
        ((x, x, 0.5, 1, 64), {}),
        ((x, x, 0.5, 2, 2**40), {}),
        ((x, x, 0.5, 2, 64), {"SIZE": 32}),
        ((x, x, 0.5, 2, 64), {"ADD": 2}),
        ((x, x, 0.5, 2, 64), {"num_warps": 2}),
    ]
    for args, kwargs in calls * 2:
        call(*args, **kwargs)
    assert recorder.plain == len(calls)
    half = len(calls)
    assert recorder.launches[half:] == recorder.launches[:half]
    assert len({id(launch[4]) for launch in recorder.launches}) == half, "each was compiled for itself"


def test_the_tensors_device_is_current_in_a_launch(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device has its own compiled kernel and stream; afterwards the caller's device is current again."""
    current = [0]

    @contextmanager
    def made_current(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", made_current)
    monkeypatch.setattr(recorder, "get_current_device", lambda: current[0])
    x = torch.zeros(2, 64)
    for index in (1, 1, 0, 0, 1):
        launch(scale_rows, (3,), torch.device("cuda", index), x, x, 0.5, 2, 64, SIZE=64, num_warps=4)
        assert recorder.launches[-1][3] == 1234 + index
        assert current == [0]
    assert recorder.plain == 2
    functions = [run[4] for run in recorder.launches]
    assert functions[0] is functions[1] is functions[4]
    assert functions[2] is functions[3]
    assert functions[0] is not functions[2]


VALUES: dict[str, Any] = {
    f"int {n}": n for n in (0, 1, -1, 2, 15, 16, 17, -16, 2**31 - 1, 2**31 - 16, 2**31, 2**31 + 1, -(2**31), -(2**31) - 1, -(2**40))
}
VALUES |= {f"int {n}": n for n in (2**63 - 1, 2**63 - 16, 2**63, 2**63 + 1, 2**64 - 16, 2**64 - 1)}
VALUES |= {"True": True, "False": False, "0.5": 0.5, "1.0": 1.0, "None": None}
for _dtype in (torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.float8_e4m3fn, torch.float8_e4m3fnuz):
    _whole = torch.zeros(64, dtype=_dtype)
    VALUES |= {
        f"{_dtype}": _whole,
        f"{_dtype}, shifted": _whole[1:],
        f"{_dtype}, 16 bytes on": _whole.view(torch.uint8)[16:32].view(_dtype),
    }
    VALUES |= {f"{_dtype}, a parameter": torch.nn.Parameter(_whole, requires_grad=False)}
    VALUES |= {f"{_dtype}, {size} bytes": torch.empty(size // _dtype.itemsize, dtype=_dtype, device="meta") for size in (2**31 - 8, 2**31)}


for _dtype, _block in ((torch.bfloat16, [16, 64]), (torch.float16, [16, 64]), (torch.bfloat16, [16, 32]), (torch.bfloat16, [32, 32])):
    _rows = torch.zeros(64, 128, dtype=_dtype)
    VALUES[f"block {_block} of {_dtype}"] = TensorDescriptor(_rows, [64, 128], [128, 1], _block)
    VALUES[f"block {_block} of {_dtype}, elsewhere"] = TensorDescriptor(_rows[16:], [40, 64], [128, 1], _block)
    for _width in (32, 64):
        _layout = NVMMASharedLayout(swizzle_byte_width=_width, element_bitwidth=16, rank=2)
        VALUES[f"block {_block} of {_dtype}, layout {_width}"] = GluonDescriptor(_rows, [64, 128], [128, 1], _block, _layout)


@pytest.mark.parametrize("target", [GFX942, SM_90], ids=["AMD", "NVIDIA"])
@pytest.mark.parametrize("options", [{}, {"do_not_specialize": ["x"]}, {"do_not_specialize_on_alignment": ["x"]}], ids=str)
def test_kinds_tell_apart_what_triton_tells_apart(monkeypatch: pytest.MonkeyPatch, target: GPUTarget, options: dict[str, Any]) -> None:
    """By Triton's own word for each argument; values of one kind are compiled for alike."""
    monkeypatch.setattr(torch.version, "hip", "7.0" if target.backend == "hip" else None)

    def kernel(x):
        pass

    jitted = triton.JITFunction(kernel, **options)
    of = create_function_from_signature(jitted.signature, jitted.params, make_backend(target))
    said: dict[Any, dict[str, list[str]]] = {}
    for name, value in VALUES.items():
        kind = Box(value).kind if hasattr(value, "block_shape") else sort((value,))[0][0]
        _, specialization, _ = of(value)
        said.setdefault(kind, {}).setdefault(str(specialization), []).append(name)
    assert len(said) > 20
    assert {str(kind): by for kind, by in said.items() if len(by) > 1} == {}


def test_other_arguments_go_triton_s_way(recorder: Recorder) -> None:
    """A tuple has no kind; constants that are no keywords, or do not come last, are not looked at."""
    x = torch.zeros(64)
    assert sort((x, (1, 2), 3)) == sort((x,))
    for _ in range(2):
        launch(constant_first, (1,), DEVICE, 64, x, num_warps=4)
        launch(scale_rows, (1,), DEVICE, x, x, 0.5, 2, 64, 64, num_warps=4)
    assert recorder.plain == 4


def test_interpreted_kernels_are_triton_s(recorder: Recorder) -> None:
    """With TRITON_INTERPRET=1 they are so from the start, on tensors of a GPU too: nothing is compiled that could be remembered."""
    ran: list[tuple[Any, ...]] = []

    class Interpreted(InterpretedFunction):
        def run(self, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
            ran.append((grid, args, kwargs))

    x = torch.zeros(2, 64)
    prepared = Prepared(Interpreted(scale_rows.fn), (3,), DEVICE, (2, 64), SIZE=64, num_warps=4)
    for _ in range(2):
        prepared(x, x, 0.5)
        assert prepared.settled(x, x, 0.5) is None
    assert ran == [((3,), (x, x, 0.5, 2, 64), {"SIZE": 64, "num_warps": 4})] * 2
    assert recorder.launches == []


def hear(*_: Any, **__: Any) -> None:
    """What a profiler adds."""


@contextmanager
def changed(knobs: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(knobs, name)
    setattr(knobs, name, value)
    yield
    setattr(knobs, name, before)


@contextmanager
def launch_hook(name: str) -> Iterator[None]:
    hooks = getattr(triton.knobs.runtime, name)
    hooks.add(hear)
    yield
    hooks.remove(hear)


@contextmanager
def pre_run_hook() -> Iterator[None]:
    scale_rows.add_pre_run_hook(hear)
    yield
    scale_rows.pre_run_hooks.remove(hear)


@pytest.mark.parametrize(
    "heard",
    [
        lambda: launch_hook("launch_enter_hook"),
        lambda: launch_hook("launch_exit_hook"),
        pre_run_hook,
        lambda: changed(triton.knobs.runtime, "debug", True),
        lambda: changed(triton.knobs.compilation, "instrumentation_mode", "mode"),
    ],
    ids=["before a launch", "after a launch", "before a run", "debug", "instrumented"],
)
def test_who_hears_of_launches_hears_of_all(recorder: Recorder, monkeypatch: pytest.MonkeyPatch, heard: Any) -> None:
    """Triton tells them, and compiles otherwise for them: launches are left to it, and nothing of it is remembered."""
    monkeypatch.setattr(triton.JITFunction, "_do_compile", _compiled_as_usual(triton.JITFunction._do_compile))
    x = torch.zeros(2, 64)
    with heard():
        call(x, x, 0.5, 2, 64)
        call(x, x, 0.5, 2, 64)
    assert recorder.plain == 2
    call(x, x, 0.5, 2, 64)
    call(x, x, 0.5, 2, 64)
    assert recorder.plain == 3
    assert recorder.launches[-1] == recorder.launches[-2]
    with heard():
        call(x, x, 0.5, 2, 64)
    assert recorder.plain == 4


def _compiled_as_usual(compile_kernel: Any) -> Any:
    """In no mode that only some versions of Triton know: it is part of a kernel's key, and that is what matters here."""

    def compiled(*args: Any, **kwargs: Any) -> Any:
        with changed(triton.knobs.compilation, "instrumentation_mode", ""):
            return compile_kernel(*args, **kwargs)

    return compiled


def test_a_prepared_launch_is_the_same_launch(recorder: Recorder) -> None:
    """Whatever is decided before: with the inputs and the numbers in order, and told apart as any launch."""
    x, y = torch.zeros(2, 64), torch.zeros(2, 65)[:, 1:]

    def expected(count: int, *args: Any) -> None:
        call(*args)
        assert recorder.launches[-2] == recorder.launches[-1]
        assert recorder.plain == count

    prepared = Prepared(scale_rows, (3,), DEVICE, (2, 64), SIZE=64, num_warps=4)
    for inputs, count in (((x, x, 0.5), 1), ((x, x, 0.25), 1), ((x, y, 0.5), 2), ((x, None, 0.5), 3), ((x, x, 2.0), 3)):
        prepared(*inputs)
        expected(count, *inputs, 2, 64)
    Prepared(scale_rows, (3,), DEVICE, (6, 48), SIZE=64, num_warps=4)(x, x, 0.5)
    expected(3, x, x, 0.5, 6, 48)  # compiled before, for other numbers
    Prepared(scale_rows, (3,), DEVICE, (6, 47), SIZE=64, num_warps=4)(x, x, 0.5)
    expected(4, x, x, 0.5, 6, 47)


def test_what_can_be_settled(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds that were launched before, of aligned tensors; not on AMD, where the size of their memory counts."""
    x = torch.zeros(2, 64)
    prepared = Prepared(scale_rows, (3,), DEVICE, (2, 64), SIZE=64, num_warps=4)
    assert prepared.settled(x, x, 0.5) is None
    y = torch.zeros(2, 65)[:, 1:]
    for inputs in ((x, x, 0.5), (x, y, 0.5), (x, None, 0.5)):
        prepared(*inputs)
    assert prepared.settled(x, y, 0.5) is None
    assert prepared.settled(x, None, 0.5) is not None
    settled = prepared.settled(x, x, 0.5)
    assert settled is not None
    prepared(x, x, 0.5)
    settled(recorder.get_current_stream(0), x.data_ptr(), x.data_ptr(), 0.5)
    assert recorder.launches[-1] == recorder.launches[-2]
    for factor in (1, 2, 2**40, True):
        prepared(x, x, factor)
        assert prepared.settled(x, x, factor) is None, "the kernel is compiled for the number"
    assert Prepared(scale_rows, (3,), torch.device("meta"), (2, 64), SIZE=64).settled(x, x, 0.5) is None
    monkeypatch.setattr(torch.version, "hip", "7.0")
    prepared(x, x, 0.5)
    monkeypatch.setattr(ready, "sort", lambda _: pytest.fail("arguments are sorted for an answer that is known"))
    assert prepared.settled(x, x, 0.5) is None


def test_boxes_are_encoded_once_an_address(recorder: Recorder) -> None:
    """What a launch passes in place of a descriptor: the box of this tensor, its shape, its strides."""
    recorder.target = SM_90
    memory, out = torch.zeros(256, 64, dtype=torch.bfloat16), torch.zeros(16, 16, dtype=torch.bfloat16)

    def prepare(shape: list[int], strides: list[int]) -> Prepared:
        box = Box(TensorDescriptor(torch.empty(256, 64, dtype=torch.bfloat16, device="meta"), shape, strides, [16, 16]))
        return Prepared(copy_box, (1,), DEVICE, (3,), [box], SIZE=16, num_warps=4)

    whole, every_other = prepare([128, 64], [64, 1]), prepare([64, 64], [128, 1])
    whole(memory, out)
    assert recorder.plain == 1
    assert recorder.encoded == [], "Triton's own launch does so itself"
    for prepared, tensor, shape, strides, count in (
        (whole, memory, [128, 64], [64, 1], 1),
        (whole, memory, [128, 64], [64, 1], 1),
        (whole, memory[8:], [128, 64], [64, 1], 2),
        (every_other, memory, [64, 64], [128, 1], 3),
        (whole, memory, [128, 64], [64, 1], 3),
        (whole, memory[8:], [128, 64], [64, 1], 3),
    ):
        prepared(tensor, out)
        box, *numbers = recorder.launches[-1][7:]
        assert (box[0], box[5], box[6]) == (tensor.data_ptr(), shape, strides)
        assert numbers == [*shape, *strides, out.data_ptr(), 3, None]
        assert len(recorder.encoded) == count
    assert recorder.plain == 1


def test_boxes_remembered_are_bounded(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boxes, "MOST", 2)
    recorder.target = SM_90
    memory, out = torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(16, 16, dtype=torch.bfloat16)
    box = Box(TensorDescriptor(memory.to("meta"), [16, 64], [64, 1], [16, 16]))
    prepared = Prepared(copy_box, (1,), DEVICE, (3,), [box], SIZE=16, num_warps=4)
    for row in (0, 0, 1, 2, 3, 0):
        prepared(memory[row:], out)
        assert len(box._encoded) <= 2
    assert len(recorder.encoded) == 5


def test_other_versions_of_triton_launch_themselves(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "RULES_KNOWN", False)
    x = torch.zeros(2, 64)
    for _ in range(3):
        call(x, x, 0.5, 2, 64)
    assert recorder.plain == 3


def test_what_is_remembered_is_bounded(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "MOST", 2)
    monkeypatch.setattr(launching, "MOST", 2)
    x = torch.zeros(2, 64)
    for rows in (1, 2, 16, 1):
        call(x, x, 0.5, rows, 64)
    assert recorder.plain == 4
    for add in (1, 2, 3, 1):
        call(x, x, 0.5, 2, 64, ADD=add)
        assert len(launching._ready) <= 2
    assert recorder.plain == 8


def hopper_decode(rank: int, rope: int, heads: int, *, with_lse: bool = True) -> tuple[Callable[[], Any], dict[str, Any]]:
    """What makes the launches of a decode anew, and tensors for them; two requests in a plan that is not looked at."""
    plan = SplitPlan(*(torch.zeros(n, 4, dtype=torch.int32) for n in (4, 8, 2)), slots=4, tile=64)
    tensors: dict[str, Any] = {
        "q": torch.zeros(2, heads, rank + rope, dtype=torch.bfloat16),
        "kv_cache": torch.zeros(3, 64, rank + rope, dtype=torch.bfloat16),
        "block_table": torch.zeros(2, 4, dtype=torch.int32),
        "seq_lens": torch.zeros(4, dtype=torch.int32)[:2],
        "qo_indptr": torch.zeros(3, dtype=torch.int32),
        "plan": plan,
        "out": torch.zeros(2, heads, rank, dtype=torch.bfloat16),
        "lse": torch.zeros(heads, 2) if with_lse else None,
        "softmax_scale": 0.1,
        "k_scale": 1.0,
    }
    layouts = [layout_of(tensors[name]) for name in ("q", "kv_cache", "out")]
    strides = (2, 1) if with_lse else None
    key = (DEVICE, CHIPS["sm_90"], *layouts, strides, 4, 2, 1, plan.counts, True, False, 16)
    return lambda: decode._launches.__wrapped__(*key), tensors


def hopper_prefill(*, with_lse: bool = True) -> tuple[Callable[[], Any], dict[str, Any]]:
    """As `hopper_decode`."""
    tensors: dict[str, Any] = {
        **{name: torch.zeros(100, 2, dim, dtype=torch.bfloat16) for name, dim in (("q", 192), ("k", 192), ("v", 128))},
        "cu_seqlens_q": torch.zeros(3, dtype=torch.int32),
        "cu_seqlens_k": torch.zeros(3, dtype=torch.int32),
        "out": torch.zeros(100, 2, 128, dtype=torch.bfloat16),
        "lse": torch.zeros(2, 100) if with_lse else None,
        "softmax_scale": 0.1,
    }
    layouts = [layout_of(tensors[name]) for name in ("q", "k", "v", "out")]
    key = (DEVICE, CHIPS["sm_90"], *layouts, (100, 1) if with_lse else None, 2, 100, True, True)
    return lambda: prefill._prepare.__wrapped__(*key), tensors


@pytest.mark.parametrize(
    "make",
    [
        partial(hopper_decode, 32, 16, 2),
        partial(hopper_decode, 32, 16, 2, with_lse=False),
        partial(hopper_decode, 512, 64, 64),
        hopper_prefill,
    ],
    ids=["decode", "decode without LSE", "decode by pairs", "prefill"],
)
def test_settled_launches_are_the_same_launches(recorder: Recorder, monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    """For other tensors of the same kind nothing is sorted or encoded anew; for others, and whoever listens, it is not settled."""
    recorder.target = SM_90
    for module in (decode, decode_config):
        monkeypatch.setattr(module, "target_of", lambda _: CHIPS["sm_90"])
    anew, tensors = make()
    scratch = torch.zeros(1 << 20)
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, device: scratch.view(dtype))
    settled, general = anew(), anew()

    def launched(launches: Any, **given: Any) -> list[tuple[Any, ...]]:
        recorder.launches.clear()
        launches(**tensors | given)
        return recorder.launches[:]

    launched(settled)
    assert settled._settled is not None
    others = {name: x.clone() for name, x in tensors.items() if isinstance(x, torch.Tensor)}
    launched(settled, **others)
    launched(settled)
    sorts: list[Any] = []
    sort_again = ready.sort

    def counted(args: tuple[Any, ...]) -> Any:
        sorts.append(args)
        return sort_again(args)

    monkeypatch.setattr(ready, "sort", counted)
    for given in ({}, {"softmax_scale": 0.25}, others):
        general._settled = None
        want = launched(general, **given)
        assert sorts
        encoded = len(recorder.encoded)
        sorts.clear()
        assert launched(settled, **given) == want
        assert sorts == []
        assert len(recorder.encoded) == encoded
    for number, kernel in enumerate([one._kernel for one in settled._settled]):
        recorder.plain = 0
        kernel.add_pre_run_hook(hear)
        launched(settled)
        kernel.pre_run_hooks.clear()
        assert recorder.plain == 1, f"launch {number} is left to Triton, the other one is not"

    taken: list[Any] = []  # from here on by the way that asks, which is not gone: its kernels would have to be compiled
    monkeypatch.setattr(Prepared, "__call__", lambda prepared, *_: taken.append(prepared.kernel))
    launched(settled)
    assert taken == []
    for name, x in tensors.items():
        if isinstance(x, torch.Tensor) and name not in ("q", "k", "v", "kv_cache"):  # those must be aligned, or it is another kernel's
            launched(settled, **{name: torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)})
            assert len(taken) == 2, name
            taken.clear()
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, device: scratch[1:].view(dtype))
    launched(settled)
    assert len(taken) == 2
    taken.clear()
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, device: scratch.view(dtype))
    if "plan" in tensors:
        for name in ("pieces_of_part", "pieces", "splits"):
            launched(settled, plan=replace(tensors["plan"], **{name: torch.zeros(33, dtype=torch.int32)[1:].view(-1, 4)}))
            assert len(taken) == 2, name
            taken.clear()
        launched(settled, k_scale=torch.ones(1))
        assert len(taken) == 2
        taken.clear()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launched(settled)
    assert len(taken) == 2, "through what makes the device current"
