"""Block tables cut into tokens, for kernels that know pages of one token alone.

Request n takes kv_indptr[n + 1] - kv_indptr[n] keys; key i of it lies in row

    slots[kv_indptr[n] + i] = block_table[owner[n], i // PAGE] * PAGE + i % PAGE

of the cache. After the last key come `TAIL` zeros: a kernel that fetches indices ahead of its range check finds a row that is there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dualmla_kernels.launch import cdiv, launch

TAIL = tl.constexpr(256)
BLOCK = 1024


@triton.jit(do_not_specialize=["owner_ptr", "table_stride"])
def _token_slots(
    block_table_ptr, owner_ptr, kv_indptr_ptr, slots_ptr, table_stride, PAGE: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr
):  # fmt: skip
    """Program (n, b): keys `b * BLOCK` on of request n."""
    n, block = tl.program_id(0), tl.program_id(1)
    first = tl.load(kv_indptr_ptr + n)
    length = tl.load(kv_indptr_ptr + n + 1) - first
    written = length + tl.where(n == tl.num_programs(0) - 1, TAIL, 0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    if block * BLOCK < written:
        owner = n
        if owner_ptr is not None:
            owner = tl.load(owner_ptr + n)
        live = i < length
        page = tl.load(block_table_ptr + owner.to(tl.int64) * table_stride + i // PAGE, mask=live, other=0)
        tl.store(slots_ptr + first + i, tl.where(live, page * PAGE + i % PAGE, 0), mask=i < written)


def num_slots(num_reqs: int, max_pages: int, page_size: int) -> int:
    """Entries that `token_slots` writes at most."""
    return num_reqs * max_pages * page_size + int(TAIL.value)


def token_slots(
    block_table: torch.Tensor,
    owner: torch.Tensor | None,
    kv_indptr: torch.Tensor,
    page_size: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """int32 [num_slots(n, max_pages, page_size)]; what lies past the last key and its tail is not written.

    Arguments:
        block_table: int32 [num_reqs, max_pages]; page * page_size must fit.
        owner: int32 [n], row of the table of each request; None: its own.
        kv_indptr: int32 [n + 1], at most max_pages * page_size keys each.
        out: written and returned where given, as long at least.
    """
    num_reqs, max_pages = kv_indptr.shape[0] - 1, block_table.shape[1]
    if out is None:
        out = torch.empty(num_slots(num_reqs, max_pages, page_size), dtype=torch.int32, device=block_table.device)
    launch(
        _token_slots, (num_reqs, cdiv(max_pages * page_size + TAIL.value, BLOCK)), out.device,
        block_table, owner, kv_indptr, out, block_table.stride(0), PAGE=page_size, BLOCK=BLOCK, TAIL=TAIL, num_warps=4,
    )  # fmt: skip
    return out
