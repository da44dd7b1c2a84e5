"""Loaded into a process: AITER of generation S6 runs on its CPU, by the stand-in. It dies of several query tokens and of the LSE."""

from __future__ import annotations

import ctypes
import inspect
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import aiter_stand_in as stand_in
import test_adapter_prefill

from dualmla.backends.aiter import probe
from dualmla.backends.aiter.signatures import describe

RELEASE, ARCH = "0.1.13", "gfx942"
HEADS = 5


def pretend() -> probe.Usable:
    """From now on AITER is usable on the CPU."""
    package, mla = stand_in.package("M22"), stand_in.module("S6")
    package.flash_attn_varlen_func = test_adapter_prefill.flash_attn_varlen_func
    sound = mla.mla_decode_fwd

    def deadly(**given: Any) -> Any:
        kills = {2: os.abort, 3: lambda: time.sleep(60), 4: lambda: ctypes.string_at(0)}  # a fault of the GPU ends in an abort too
        kills.get(given["max_seqlen_q"], int)()
        if given["return_lse"]:
            sys.exit("no compiler")
        return sound(**given)

    deadly.__signature__ = inspect.signature(sound)  # type: ignore[attr-defined]
    mla.mla_decode_fwd = deadly
    usable = probe.Usable(describe(package, mla, RELEASE), ARCH)
    probe.usable = lambda device: usable
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=4)
    torch.cuda.is_current_stream_capturing = lambda: False
    return usable


if __name__ != "aiter_pretended":
    pretend()
