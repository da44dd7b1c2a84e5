"""What runs in the trial's subprocess: the import, and one small decode checked against float64."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import torch

from dualmla.backends.aiter.launch import decode
from dualmla.backends.aiter.signatures import describe
from dualmla.backends.aiter.support import LaunchShape
from dualmla.backends.aiter.trial import described
from dualmla.metadata import decode_metadata

HEADS, LENGTHS = 16, [70, 3]  # every release has 16 heads; more than one 64-token block, and less
SOFTMAX_SCALE = 192**-0.5
TOLERANCE = 2**-6
"""Of the largest output: four bf16 roundings. P and the output are rounded to bf16 once each, wrong kernels are off by the whole."""


def main(result: str, device: str) -> None:
    """Write what went wrong to the file `result`, empty when nothing did, and leave without AITER's clean-up."""
    try:
        failure = attempt(torch.device(device if torch.cuda.is_available() else "cpu"))
    except BaseException as error:
        failure = f"can't be imported or run: {described(error)}"
    # written under another name first: a file that is there is whole
    Path(result + ".part").write_text(failure)
    Path(result + ".part").rename(result)
    os._exit(0)


def attempt(device: torch.device) -> str:
    """Import AITER and decode two requests with it; what was wrong with the result."""
    aiter = describe(importlib.import_module("aiter"), importlib.import_module("aiter.mla"), "on trial")
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(len(LENGTHS), HEADS, 576, generator=generator).bfloat16().to(device)
    kv_cache = torch.randn(sum(LENGTHS) + 1, 1, 576, generator=generator).bfloat16().to(device)
    pages = torch.randperm(kv_cache.shape[0], generator=generator).int()
    table = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.int32)
    table[0, : LENGTHS[0]], table[1, : LENGTHS[1]] = pages[: LENGTHS[0]], pages[LENGTHS[0] : sum(LENGTHS)]
    meta = decode_metadata(table, LENGTHS, page_size=1, device=device)
    out = torch.full((len(LENGTHS), HEADS, 512), float("nan"), dtype=torch.bfloat16, device=device)
    units = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    decode(
        aiter, LaunchShape(HEADS, 1), q, kv_cache, meta, SOFTMAX_SCALE,
        causal=True, out=out, lse=None, k_scale=1.0, compute_units=units, captured=False,
    )  # fmt: skip

    expected = torch.empty(out.shape, dtype=torch.float64, device=device)
    for row, (ids, length) in enumerate(zip(table, LENGTHS, strict=True)):
        keys = kv_cache[ids[:length].long(), 0].double()
        expected[row] = torch.softmax(SOFTMAX_SCALE * q[row].double() @ keys.T, -1) @ keys[:, :512]
    error, allowed = float((out.double() - expected).abs().max()), TOLERANCE * float(expected.abs().max())
    return "" if error <= allowed else f"decodes wrongly: off by {error:.2g} where {allowed:.2g} is allowed"
