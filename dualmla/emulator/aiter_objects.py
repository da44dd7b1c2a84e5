"""AITER's code objects: where they lie on this machine, and what each of the MLA ones is for.

They come from the PyPI wheel `amd-aiter` (under `aiter_meta/hsa/<arch>/`), installed or unpacked; they are never part of
this repository, and AITER itself is not imported. The table restates the launcher (`asm_mla.cu`, release
0.1.7.post2.dev18) and what running the kernels showed.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from dualmla.emulator.elf import CodeObject, load_code_object
from dualmla.emulator.errors import EmulatorError

DECODE, PERSISTENT, ABSORBED_PREFILL, VARLEN_PREFILL = "decode", "persistent decode", "absorbed prefill", "varlen prefill"


@dataclass(frozen=True)
class AiterKernel:
    """One code object. `tile_rows` query rows (heads x tokens) are a workgroup's; splits take turns of `block` tokens."""

    family: str
    heads: int
    query_lens: tuple[int, ...] = (1,)
    tile_rows: int = 128
    block: int = 16
    q_bytes: int = 2
    kv_bytes: int = 2
    archs: tuple[str, ...] = ("gfx942", "gfx950")
    one_split_bf16: bool = True
    """With one split, bf16 results go into the partial buffer and no LSE is written."""
    causal: bool = True
    group: bool = True


_GFX942, _GFX950 = ("gfx942",), ("gfx950",)

KERNELS = {
    "mla_dec_stage1_bf16_a16w16_subQ16_mqa16": AiterKernel(DECODE, 16, tile_rows=16, block=64, one_split_bf16=False),
    "mla_dec_stage1_bf16_a16w16_subQ128_mqa128": AiterKernel(DECODE, 128),
    "mla_a16w16_qh16_m16x4_n16x1_coex0_mask1": AiterKernel(DECODE, 16, query_lens=(1, 2, 3, 4)),
    "mla_a16w16_qh16_m32x4_n16x1_coex0_mask1": AiterKernel(DECODE, 16, query_lens=(5, 6, 7, 8)),
    "mla_a8w8_qh16_qseqlen1_gqaratio16": AiterKernel(DECODE, 16, block=128, q_bytes=1, kv_bytes=1),
    "mla_a8w8_qh16_qseqlen2_gqaratio16": AiterKernel(DECODE, 16, query_lens=(2,), block=128, q_bytes=1, kv_bytes=1),
    "mla_a8w8_qh16_qseqlen4_gqaratio16": AiterKernel(DECODE, 16, query_lens=(3, 4), block=64, q_bytes=1, kv_bytes=1),
    "mla_a8w8_qh128_m32x4_n16x2_msk1": AiterKernel(DECODE, 128, block=32, q_bytes=1, kv_bytes=1),
    "mla_a8w8_qh128_m32x4_n16x2_msk0": AiterKernel(DECODE, 128, block=32, q_bytes=1, kv_bytes=1, archs=_GFX950),
    "mla_a16w16_qh16_m16x4_n16x1_coex0_mask1_ps": AiterKernel(PERSISTENT, 16, query_lens=(1, 2, 3, 4)),
    "mla_a16w8_qh16_m16x4_n16x1_coex0_mask1_ps": AiterKernel(PERSISTENT, 16, query_lens=(1, 2, 3, 4), kv_bytes=1),
    "mla_a8w8_qh16_qseqlen1_gqaratio16_ps": AiterKernel(PERSISTENT, 16, block=128, q_bytes=1, kv_bytes=1),
    "mla_a8w8_qh16_qseqlen2_gqaratio16_ps": AiterKernel(PERSISTENT, 16, query_lens=(2,), block=128, q_bytes=1, kv_bytes=1),
    "mla_a8w8_qh16_qseqlen4_gqaratio16_ps": AiterKernel(PERSISTENT, 16, query_lens=(3, 4), block=64, q_bytes=1, kv_bytes=1),
    "mla_a8w8_qh16_qseqlen2_gqaratio16_ps_page": AiterKernel(
        PERSISTENT, 16, query_lens=(2,), block=128, q_bytes=1, kv_bytes=1, archs=_GFX950
    ),
    "mla_a8w8_qh16_qseqlen4_gqaratio16_ps_page": AiterKernel(
        PERSISTENT, 16, query_lens=(3, 4), block=64, q_bytes=1, kv_bytes=1, archs=_GFX950
    ),
    "mla_a8w8_qh128_m32x4_n16x2_msk0_ps": AiterKernel(PERSISTENT, 128, block=32, q_bytes=1, kv_bytes=1),
    "mla_a8w8_qh128_m32x4_n16x2_msk1_ps": AiterKernel(PERSISTENT, 128, block=32, q_bytes=1, kv_bytes=1, archs=_GFX950),
    "mla_pfl_bf16_a16w16_causal_subQ16_mqa16": AiterKernel(ABSORBED_PREFILL, 16),
    "mla_pfl_bf16_a16w16_causal_subQ128_mqa128": AiterKernel(ABSORBED_PREFILL, 128),
    "fwd_hd192_hd128_bf16": AiterKernel(VARLEN_PREFILL, 0, archs=_GFX950, causal=False, group=False),
    "fwd_hd192_hd128_bf16_causal": AiterKernel(VARLEN_PREFILL, 0, archs=_GFX950, group=False),
    "fwd_hd192_hd128_bf16_group": AiterKernel(VARLEN_PREFILL, 0, archs=_GFX950, causal=False),
    "fwd_hd192_hd128_bf16_causal_group": AiterKernel(VARLEN_PREFILL, 0, archs=_GFX950),
}
"""File stem -> what it is. `heads` 0: any."""


class AiterNotFoundError(EmulatorError):
    """No installed `amd-aiter` distribution holds the code objects."""


def find_code_objects(root: str | Path | None = None) -> Path:
    """The directory `aiter_meta/hsa`: of an unpacked wheel at `root`, else of the installed `amd-aiter` distribution.

    Raises `AiterNotFoundError` with what to install.
    """
    if root is not None:
        found = Path(root) / "aiter_meta" / "hsa"
        if not found.is_dir():
            raise AiterNotFoundError(f"{root} is no unpacked amd-aiter wheel: it has no directory aiter_meta/hsa")
        return found
    try:
        distribution = importlib.metadata.distribution("amd-aiter")
    except importlib.metadata.PackageNotFoundError:
        raise AiterNotFoundError(
            "AITER's code objects are not here; `pip install --no-deps amd-aiter==0.1.7.post2.dev18` brings them"
        ) from None
    found = Path(str(distribution.locate_file("aiter_meta/hsa")))
    if not found.is_dir():
        raise AiterNotFoundError(f"the installed amd-aiter {distribution.version} carries no code objects at {found}")
    return found


def path_of(hsa: Path, arch: str, name: str) -> Path:
    """File of the code object `name` for `arch`. Raises `AiterNotFoundError` if the release does not have it."""
    folder = "fmha_v3_fwd" if KERNELS[name].family == VARLEN_PREFILL else "mla"
    path = hsa / arch / folder / f"{name}.co"
    if not path.is_file():
        raise AiterNotFoundError(f"this AITER release has no {name} for {arch}")
    return path


def load_kernel(hsa: Path, arch: str, name: str) -> CodeObject:
    """Load the code object `name` for `arch`."""
    return load_code_object(path_of(hsa, arch, name))
