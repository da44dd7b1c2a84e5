"""dualmla as a peer (`dualmla.bench.peers`), for drivers that time such modules; a decode is planned before it is timed, as theirs are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dualmla_kernels.decode import mla_decode, plan_decode
from dualmla_kernels.prefill import mla_prefill


def make(
    batch: int, seq_lens: list[int], heads: int, page_size: int = 64, dtype: torch.dtype = torch.bfloat16, inputs: Any = None
) -> Callable[[], torch.Tensor]:
    """A callable that decodes `inputs` (q, kv, block_table, seq_lens, scale) and returns out [batch, heads, 512]."""
    device = inputs.q.device
    out = torch.empty(batch, heads, 512, dtype=dtype, device=device)
    lse = torch.empty(heads, batch, dtype=torch.float32, device=device)
    qo_indptr = torch.arange(batch + 1, dtype=torch.int32, device=device)
    plan = plan_decode(inputs.seq_lens, num_heads=heads, max_query_len=1, dtype=dtype)

    def decode() -> torch.Tensor:
        mla_decode(
            inputs.q,
            inputs.kv,
            inputs.block_table,
            inputs.seq_lens,
            qo_indptr,
            1,
            inputs.scale,
            causal=True,
            out=out,
            lse=lse,
            plan=plan,
        )
        return out

    return decode


def make_prefill(seq_lens: list[int], heads: int, dtype: torch.dtype = torch.bfloat16, inputs: Any = None) -> Callable[[], torch.Tensor]:
    """A callable that prefills `inputs` (q, k, v, cu, scale) causally and returns out [T, heads, 128]; what is planned is timed too."""
    tokens = inputs.q.shape[0]
    out = torch.empty(tokens, heads, 128, dtype=dtype, device=inputs.q.device)
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=inputs.q.device)

    def prefill() -> torch.Tensor:
        mla_prefill(inputs.q, inputs.k, inputs.v, inputs.cu, inputs.cu, max(seq_lens), inputs.scale, causal=True, out=out, lse=lse)
        return out

    return prefill
