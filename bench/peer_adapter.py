"""dualmla in the form of the peers' benchmark driver: `make` for decode; planning happens outside the timed call, as the peers do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dualmla_kernels.decode import mla_decode, plan_decode


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
