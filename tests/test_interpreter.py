"""Running interpreted on a CPU without a trace: the user's kernels, Triton's own functions and the environment stay as they are."""

from __future__ import annotations

import os
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from support import RunPython
from triton.runtime.jit import JITFunction

import dualmla
from dualmla.testing import DecodeCase, assert_bits_equal, assert_decode_agrees, make_decode_inputs, run_decode

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where there is no GPU")

CASE = DecodeCase(num_heads=3, seq_lens=(70, 5, 0), query_lens=(2, 1, 1), page_size=16, num_kv_splits=2)


@triton.jit
def users_helper(x):
    return x * 2


@triton.jit
def users_kernel(x_ptr, BLOCK: tl.constexpr):
    """Somebody else's kernel: it calls functions that our interpreted launches replace for a while."""
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(x_ptr, users_helper(tl.sum(tl.exp(x - tl.max(x, 0)), 0)))


def decode() -> None:
    inputs = make_decode_inputs(CASE)
    assert_decode_agrees(*run_decode(inputs, "triton"), inputs)


def decode_that_raises() -> None:
    """A latent row of 48 is no range that a kernel can have: it fails after it has called other functions of ours."""
    from dualmla_kernels.decode import mla_decode

    q, cache, out = torch.ones(1, 2, 64), torch.ones(4, 16, 64), torch.empty(1, 2, 48)
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(Exception, match="power of 2"):
        mla_decode(q, cache, one[None], one, torch.arange(2, dtype=torch.int32), 1, 0.1, causal=True, out=out, lse=None)


def triton_state() -> dict[tuple[str, str], Any]:
    """Every name of every module of Triton and of our kernels, and of the classes in them."""
    state: dict[tuple[str, str], Any] = {}
    for module_name, module in list(sys.modules.items()):
        if module is None or module_name.partition(".")[0] not in ("triton", "dualmla_kernels", "test_interpreter"):
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, types.ModuleType) or name in ("__builtins__", "__warningregistry__"):
                continue
            state[module_name, name] = value
            if isinstance(value, type) and value.__module__.startswith("triton"):
                state.update({(f"{module_name}.{name}", member): held for member, held in list(vars(value).items())})
    return state


@pytest.mark.parametrize("work", [decode, decode_that_raises])
def test_nothing_of_triton_has_changed(work: Any) -> None:
    """Not one function, method or class is another object than before, also after a kernel raised."""
    decode()  # imports what an interpreted launch imports
    before = triton_state()
    work()
    after = triton_state()
    changed = [".".join(key) for key in before if key not in after or after[key] is not before[key]]
    assert changed == []
    added = [".".join(key) for key in after if key not in before and key[0].startswith("triton")]
    assert added == []
    for function in (users_kernel, users_helper, tl.max, tl.sum, tl.cumsum, tl.zeros, tl.cdiv):
        assert isinstance(function, JITFunction), function
    decode()


def test_the_environment_has_not_changed() -> None:
    before = dict(os.environ)
    decode()
    assert dict(os.environ) == before


def compile_for_gfx942(kernel: Any) -> bytes:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(kernel, {"x_ptr": "*fp32", "BLOCK": "constexpr"}, {"BLOCK": 128})
    return bytes(triton.compile(source, target=GPUTarget("hip", "gfx942", 64)).asm["amdgcn"], "utf-8")


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_the_users_kernel_compiles_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same assembly, in this process, after one launch that succeeded and one that raised."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "before"))
    before = compile_for_gfx942(users_kernel)
    decode()
    decode_that_raises()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "after"))
    assert compile_for_gfx942(users_kernel) == before
    assert any((tmp_path / "after").iterdir()), "it was compiled again, not looked up"


def test_our_kernels_compile_for_gfx942_after_they_were_interpreted(run_python: RunPython, tmp_path: Path) -> None:
    """As somebody would look at the assembly of what they run on a CPU."""
    code = """
import torch, triton, dualmla
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dualmla_kernels.decode_kernel import _combine
meta = dualmla.decode_metadata(torch.zeros(1, 1, dtype=torch.int32), [1], page_size=1, device="cpu")
dualmla.mla_decode(torch.ones(1, 2, 576), torch.ones(1, 1, 576), meta, 0.1, num_kv_splits=2, backend="triton")
constants = {"H": 16, "D": 512, "BS": 8, "BD": 512, "PDL": False, "EXACT": False}
signature = {"partial_out_ptr": "*fp32", "partial_lse_ptr": "*fp32", "splits_ptr": "*i32", "qo_indptr_ptr": "*i32"}
signature |= {"out_ptr": "*bf16", "lse_ptr": "*fp32"}
signature = {name: signature.get(name, "constexpr" if name in constants else "i64") for name in _combine.arg_names}
source = ASTSource(_combine, signature, constants)
assembly = triton.compile(source, target=GPUTarget("hip", "gfx942", 64)).asm["amdgcn"]
print("v_exp_f32" in assembly and "gfx942" in assembly)
"""
    assert run_python(code, TRITON_CACHE_DIR=str(tmp_path)).splitlines()[-1] == "True"


@pytest.mark.parametrize(
    ("imports", "interpret"),
    [
        ("import triton, triton.language\nfrom test_interpreter import users_kernel\nimport dualmla", None),
        ("import triton.runtime.interpreter, dualmla", None),
        ("import dualmla, triton", "1"),
        ("import triton, triton.language\nfrom test_interpreter import users_kernel\nimport dualmla", "1"),
    ],
    ids=["triton first", "interpreter first", "TRITON_INTERPRET", "TRITON_INTERPRET, triton first"],
)
def test_whoever_imports_triton_first(imports: str, interpret: str | None, run_python: RunPython) -> None:
    """With nothing set and with TRITON_INTERPRET=1, with kernels defined before ours or not: the same decode."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        f"{imports}\n"
        "from dualmla.testing import DecodeCase, assert_decode_agrees, make_decode_inputs, run_decode\n"
        "for splits in (1, 2):\n"
        "    inputs = make_decode_inputs(DecodeCase(num_heads=3, seq_lens=(70, 5, 0), page_size=16, num_kv_splits=splits))\n"
        "    assert_decode_agrees(*run_decode(inputs, 'triton'), inputs)\n"
        "import triton.language as tl\n"
        "print(type(tl.max).__name__)\n"
    )
    variables = {"TRITON_INTERPRET": interpret} if interpret else {}
    kind = run_python(code, str(Path(__file__).parent), **variables).split()[-1]
    assert kind == ("InterpretedFunction" if interpret else "JITFunction")


def test_threads() -> None:
    """Launches from several threads wait for each other: each gets its own result, and nothing is left replaced."""
    cases = [DecodeCase(num_heads=3, seq_lens=(40 + 30 * i, 5), page_size=16, seed=i, num_kv_splits=1 + i % 2) for i in range(4)]
    want = [run_decode(make_decode_inputs(case), "triton") for case in cases]
    before = triton_state()
    got: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def work(number: int) -> None:
        for _ in range(3):
            inputs = make_decode_inputs(cases[number])
            got[number] = dualmla.mla_decode(
                inputs.q, inputs.kv_cache, inputs.meta, cases[number].softmax_scale, return_lse=True, backend="triton",
                num_kv_splits=cases[number].num_kv_splits,
            )  # fmt: skip

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, (out, lse) in enumerate(want):
        assert_bits_equal(got[number][0], out, f"out of thread {number}")
        assert_bits_equal(got[number][1], lse, f"lse of thread {number}")
    after = triton_state()
    assert [key for key in before if after.get(key) is not before[key]] == []


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_are_rounded_to_nearest_even(dtype: torch.dtype, splits: int) -> None:
    """Two keys of equal weight: the output is their mean, exact in fp32, so that its rounding alone is seen; half of them are ties."""
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randn(2, 512, generator=generator).to(dtype)
    step = torch.ones(256, dtype=torch.int16)
    pairs[1, :256] = (pairs[0, :256].view(torch.int16) + step).view(dtype)  # neighbours: the mean lies half-way
    cache = torch.zeros(2, 1, 576, dtype=dtype)
    cache[:, 0, :512] = pairs
    meta = dualmla.decode_metadata(torch.tensor([[0, 1]], dtype=torch.int32), [2], page_size=1, device="cpu")
    out = dualmla.mla_decode(torch.zeros(1, 1, 576, dtype=dtype), cache, meta, 0.1, num_kv_splits=splits, backend="triton")
    exact = pairs.double().mean(0)
    assert int((exact[:256] != exact[:256].to(dtype).double()).sum()) == 256, "all of these are between two numbers"
    assert_bits_equal(out[0, 0], exact.to(dtype))


def test_a_gpu_machine_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is interpreted where there is a GPU: CPU tensors are refused with a sentence that says what to do."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(dualmla.BackendUnavailable, match="the tensors are on a CPU and this machine has a GPU: move them there"):
        dualmla.select_backend(dualmla.MLAConfig(num_heads=5, softmax_scale=0.1), "cpu", "triton")
