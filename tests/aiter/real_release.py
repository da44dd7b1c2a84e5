"""Run as a program: the real AITER through the whole of our backend, on a CPU that claims to be a gfx942. Prints JSON.

Arguments: which cases, those over a float8 cache with a p before; else all the others. With the emulator P is rounded to bf16, as on
the GPU, so the errors are told beside the counts.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch

torch.version.hip = "6.4.43482"
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_properties = lambda device: SimpleNamespace(gcnArchName="gfx942:sramecc+", multi_processor_count=4)

from aiter_case import SCALE, Case  # noqa: E402

import dualmla  # noqa: E402
from dualmla.backends.aiter import launch, probe  # noqa: E402
from dualmla.backends.aiter.support import launch_shape  # noqa: E402

CASES: list[dict[str, Any]] = [
    {"seq_lens": [70, 3], "query_lens": [1, 1]},
    {"seq_lens": [70, 0, 129], "query_lens": [1, 1, 1], "heads": 8, "padding": 2},
    {"seq_lens": [9, 7, 66], "query_lens": [1, 0, 1], "heads": 4, "page_size": 16},
    {"seq_lens": [70, 3], "query_lens": [2, 1], "page_size": 3},
    {"seq_lens": [70, 3, 2], "query_lens": [4, 2, 4]},
    {"seq_lens": [50, 9, 20, 33], "query_lens": [4] * 4},  # a request a compute unit: one split
    {"seq_lens": [50, 9, 20, 33], "query_lens": [3] * 4},
    {"seq_lens": [50, 9, 20, 65], "query_lens": [1] * 4},
    {"seq_lens": [30, 3], "query_lens": [1, 3], "heads": 128},
    {"seq_lens": [30, 3], "query_lens": [1, 1], "heads": 128},
]
FLOAT8 = {"cache": "float8_e4m3fnuz", "k_scale": 0.375}
PERSISTENT: list[dict[str, Any]] = [
    {"seq_lens": [70, 3], "query_lens": [1, 1], **FLOAT8},
    {"seq_lens": [700, 65, 1, 130], "query_lens": [1] * 4, "page_size": 16, **FLOAT8},  # cut into parts
    {"seq_lens": [70, 0, 33, 0], "query_lens": [1] * 4, "heads": 20, "padding": 2, **FLOAT8},  # findings 4 and 11
    {"seq_lens": [65, 17, 2], "query_lens": [2, 4, 4], "page_size": 3, **FLOAT8},  # finding 9
]


def main() -> None:
    device = torch.device("cuda:0")
    reasons = dualmla.AiterMLABackend.not_supported_reasons(dualmla.MLAConfig(num_heads=16, softmax_scale=SCALE), device)
    found = probe.usable(device)
    aiter = None if isinstance(found, str) else found.aiter
    results: list[dict[str, Any]] = []
    named = {str(i): case for i, case in enumerate(CASES)} | {f"p{i}": case for i, case in enumerate(PERSISTENT)}
    cases = CASES if len(sys.argv) == 1 else [named[name] for name in sys.argv[1:]]
    for kind in cases if aiter is not None else []:
        case = Case(**kind)
        out, _ = case.buffers()
        calls: list[dict[str, Any]] = []

        def recorded(calls: list[dict[str, Any]] = calls, **given: Any) -> Any:
            calls.append(given)
            return aiter.decode(**given)

        shape = launch_shape(aiter.signature, "gfx942", case.q.shape[1], case.kv_cache.dtype)
        launch.decode(
            dataclasses.replace(aiter, decode=recorded), shape, case.q, case.kv_cache, case.meta, SCALE,
            causal=True, out=out, lse=None, k_scale=case.k_scale, compute_units=4, captured=False,
        )  # fmt: skip
        expected = case.reference()[0].double()
        # one bf16 step: Triton's interpreter cuts fp32 to bf16, it does not round
        wrong = ((out.double() - expected).abs() > 2**-7 * expected.abs() + 1e-6) | out.isnan()
        error = float((out.double() - expected).abs().max() / expected.abs().max())
        results.append(
            {
                "error": error,
                "case": kind,
                "wrong": int(wrong.sum()),
                "splits": calls[0].get("num_kv_splits"),
                "q": calls[0]["max_seqlen_q"],
            }
        )
    said = {"reasons": reasons, "results": results}
    if aiter is not None:
        mla = sys.modules["aiter.mla"]
        said |= {
            "generation": aiter.signature.generation,
            "version": aiter.version,
            "lse": aiter.signature.writes_lse,
            "prefill": aiter.attention is not None,
            "plans": None if aiter.planner is None else aiter.planner.takes,
        }
        said |= {"schema": str(torch.ops.aiter.mla_decode_stage1_asm_fwd.default._schema), "file": mla.__file__}
        said["cleared"] = aiter.forget_splits is not None and mla.get_meta_param.cache_info().currsize
    print(json.dumps(said))


if __name__ == "__main__":
    main()
