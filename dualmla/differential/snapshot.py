"""What a decode read and wrote, copied without a wait for the device, and a second backend's word on the copy.

Everything is index arithmetic on the device. The copy holds a window of the batch's requests. Where requests have fewer
new tokens than the longest, each gets as many queries, its own ones last: masked from the bottom right, they see what they
saw. A request longer than the copy has room for counts as empty, and its rows are not compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dualmla.backends.base import MLABackend
from dualmla.differential.problems import DecodeProblem, Result
from dualmla.metadata import MLAMetadata, decode_metadata
from dualmla.testing import SAFETY, U32, DecodeCase, DecodeValues


@dataclass(frozen=True)
class DecodeSeen:
    """The arguments of an `MLABackend.mla_decode` that has run.

    `seq_lens` are the lengths that it read, where `meta` may have been moved on since; None: those of `meta`.
    """

    q: torch.Tensor
    kv_cache: torch.Tensor
    meta: MLAMetadata
    softmax_scale: float
    causal: bool
    out: torch.Tensor
    lse: torch.Tensor | None
    k_scale: float | torch.Tensor
    num_kv_splits: int | None
    seq_lens: torch.Tensor | None = None

    @property
    def lengths(self) -> torch.Tensor:
        """int32 [num_reqs] on the device."""
        return self.meta.seq_lens if self.seq_lens is None else self.seq_lens

    @property
    def held_bytes(self) -> int:
        """Memory that is not reused as long as this is remembered; the cache and the metadata are the engine's."""
        own = (self.q, self.out, self.lse, self.seq_lens)
        return sum(tensor.untyped_storage().nbytes() for tensor in own if tensor is not None)

    def request_bytes(self, tokens: int) -> int:
        """Most that a snapshot takes of a request of up to `tokens` tokens."""
        pages = -(-tokens // self.meta.page_size)
        cache = pages * self.meta.page_size * self.kv_cache.shape[2] * self.kv_cache.element_size()
        row = self.q.shape[1] * (self.q.shape[2] + 2 * self.out.shape[2]) * self.q.element_size()
        return cache + self.meta.max_query_len * row


@dataclass(frozen=True)
class Snapshot:
    """A window of the requests of a decode: R of them with n queries and up to P pages each.

    Attributes:
        seen: sizes, scale and flags; its tensors may have changed since.
        q: [R * n, H, D + rope], out: [R * n, H, D], lse: [H, R * n] or None, of the backend that ran.
        pages: [R * P, page_size, D + rope].
        seq_lens: int32 [R]; 0 for a request that did not fit.
        valid: bool [R * n], the rows that are a token's.
        k_scale: a copy.
    """

    seen: DecodeSeen
    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    pages: torch.Tensor
    seq_lens: torch.Tensor
    valid: torch.Tensor
    k_scale: float | torch.Tensor

    @classmethod
    def take(cls, seen: DecodeSeen, window: slice, tokens: int) -> Snapshot:
        """Copy the requests of `window` that have at most `tokens` tokens."""
        meta, device = seen.meta, seen.q.device
        page_size, n = meta.page_size, meta.max_query_len
        columns = min(-(-tokens // page_size), meta.block_table.shape[1])
        lens = seen.lengths[window]
        lens = torch.where(lens <= columns * page_size, lens, 0)
        live = torch.arange(columns, device=device) < ((lens + page_size - 1) // page_size)[:, None]
        ids = torch.where(live, meta.block_table[window, :columns], 0).flatten().long()
        own = meta.query_lens[window]
        place = torch.arange(n, device=device) - (n - own)[:, None]  # of a query among the request's own
        rows = (meta.qo_indptr[:-1][window][:, None] + place).clamp(0, max(seen.q.shape[0] - 1, 0)).flatten()
        valid = ((place >= 0) & (lens > 0)[:, None]).flatten()
        lse = None if seen.lse is None else seen.lse[:, rows]
        k_scale = seen.k_scale.clone() if isinstance(seen.k_scale, torch.Tensor) else seen.k_scale
        pages = seen.kv_cache.view(torch.uint8)[ids].view(seen.kv_cache.dtype)
        return cls(seen, seen.q[rows], seen.out[rows], lse, pages, lens.int(), valid, k_scale)

    @property
    def num_reqs(self) -> int:
        return self.seq_lens.shape[0]

    def run(self, backend: type[MLABackend]) -> Result:
        """`backend` on the copy."""
        seen = self.seen
        columns = self.pages.shape[0] // max(self.num_reqs, 1)
        table = torch.arange(self.pages.shape[0], dtype=torch.int32, device=self.q.device).view(self.num_reqs, columns)
        new = [seen.meta.max_query_len] * self.num_reqs
        meta = decode_metadata(table, self.seq_lens, new, page_size=seen.meta.page_size, device=self.q.device)
        out = torch.empty_like(self.out)
        lse = None if self.lse is None else torch.empty_like(self.lse)
        backend.mla_decode(
            self.q, self.pages, meta, seen.softmax_scale, causal=seen.causal, out=out, lse=lse, k_scale=self.k_scale,
            num_kv_splits=seen.num_kv_splits,
        )  # fmt: skip
        return Result(out, lse)

    def differs(self, other: Result) -> torch.Tensor:
        """bool [R * n] on the device: tokens where the two results are further apart than two right ones can be.

        A bound of the error budget (`exact_attention`) that needs no truth: weights sum to 1, so a request's largest |v|
        stands for every weighted sum of |v|, and the product of the largest norms for the size of a score.
        """
        seen, rank = self.seen, self.out.shape[2]
        n, dim = seen.meta.max_query_len, self.q.shape[2]
        scale = self.k_scale.float() if isinstance(self.k_scale, torch.Tensor) else self.k_scale
        columns = self.pages.shape[0] // max(self.num_reqs, 1)
        keys = columns * seen.meta.page_size
        pages = self.pages if self.pages.dtype.itemsize > 1 else self.pages.to(torch.bfloat16)  # norms know no fp8
        rows = pages.view(self.num_reqs, keys, dim)
        live = torch.arange(keys, device=rows.device) < self.seq_lens[:, None]

        def most(part: torch.Tensor, order: float) -> torch.Tensor:
            """The largest norm of a live row of each request, for each of its queries: [R * n]."""
            norms = torch.linalg.vector_norm(part, order, -1, dtype=torch.float32)
            return torch.where(live, norms, 0.0).amax(1).mul(scale).repeat_interleave(n)

        largest = most(rows[..., :rank], float("inf"))[:, None, None]
        norm = most(rows, 2.0)
        size = seen.softmax_scale * self.q.float().square().sum(-1).amax(-1).sqrt() * norm
        score = torch.expm1((dim**0.5 + 4) * U32 * size) + (keys**0.5 + 8) * U32
        unit = torch.finfo(self.out.dtype).eps / 2
        mine, theirs = self.out.float(), other.out.float()
        least = torch.finfo(self.out.dtype).smallest_normal
        allowed = 2 * SAFETY * (largest * (2 * score[:, None, None] + unit) + mine.abs() * unit + least)
        apart = ~((mine - theirs).abs() <= allowed).all(-1).all(-1)
        if self.lse is not None and other.lse is not None:
            near = (self.lse - other.lse).abs() <= 2 * SAFETY * (score + 4 * U32 * other.lse.abs())
            apart |= ~((self.lse == other.lse) | near).all(0)
        return torch.logical_and(apart, self.valid)

    def problem(self) -> DecodeProblem:
        """The copy as a problem on the CPU, for the judge and for a file. Waits for the device, unless it is `on_host`."""
        seen = self.seen
        n, page_size = seen.meta.max_query_len, seen.meta.page_size
        valid = self.valid.view(self.num_reqs, n).cpu()
        q = self.q.cpu().view(self.num_reqs, n, *self.q.shape[1:])
        columns = self.pages.shape[0] // max(self.num_reqs, 1)
        pages = self.pages.cpu().view(self.num_reqs, columns * page_size, -1)
        fitting = valid.any(1).nonzero().flatten().tolist()
        lens = self.seq_lens.tolist()
        case = DecodeCase(
            num_heads=q.shape[2],
            seq_lens=tuple(lens[r] for r in fitting),
            query_lens=tuple(int(valid[r].sum()) for r in fitting),
            page_size=page_size,
            dtype=q.dtype,
            kv_cache_dtype=pages.dtype,
            softmax_scale=seen.softmax_scale,
            causal=seen.causal,
            num_kv_splits=seen.num_kv_splits,
            k_scale=None if float(self.k_scale) == 1.0 else float(self.k_scale),
            kv_lora_rank=self.out.shape[2],
            qk_rope_head_dim=self.q.shape[2] - self.out.shape[2],
        )
        own = [q[r][valid[r]] for r in fitting]
        return DecodeProblem(DecodeValues(case, torch.cat(own) if own else q[:0, 0], tuple(pages[r, : lens[r]] for r in fitting)))

    def result(self) -> Result:
        """What the backend that ran returned, for the rows of `problem`. Waits for the device, unless it is `on_host`."""
        valid = self.valid.cpu()
        return Result(self.out.cpu()[valid], None if self.lse is None else self.lse.cpu()[:, valid])

    def used_on(self, stream: torch.cuda.Stream) -> None:
        """Tell the allocator that another stream reads the copy."""
        for tensor in (self.q, self.out, self.lse, self.pages, self.seq_lens, self.valid, self.k_scale):
            if isinstance(tensor, torch.Tensor):
                tensor.record_stream(stream)

    def on_host(self) -> Snapshot:
        """The copy in pinned memory, there once the current stream has got this far."""
        return Snapshot(
            self.seen,
            on_host(self.q),
            on_host(self.out),
            None if self.lse is None else on_host(self.lse),
            on_host(self.pages),
            on_host(self.seq_lens),
            on_host(self.valid),
            on_host(self.k_scale) if isinstance(self.k_scale, torch.Tensor) else self.k_scale,
        )


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, there once the current stream has got this far; a tensor of the CPU as it is."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
