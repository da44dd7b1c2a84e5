"""Backends that are wrong on purpose, one fault each: `dualmla check --load tests/differential/faults.py --backend fault-scale`.

All are one plain attention in fp32 with one thing spoilt, so that nothing but the fault can be found.
"""

import dataclasses
import math
import os
import random
import time
from typing import ClassVar

import torch

import dualmla
from dualmla.backends.reference import ReferenceMLABackend


class Sound(ReferenceMLABackend):
    """No fault: what the others spoil."""

    @classmethod
    def get_impl_cls(cls):
        return type("Layer", (super().get_impl_cls(),), {"ops": cls})

    @classmethod
    def mla_decode(cls, q, kv_cache, meta, softmax_scale, *, causal, out, lse, k_scale, num_kv_splits):
        out.zero_()
        if lse is not None:
            lse.fill_(-math.inf)
        first = meta.qo_indptr.tolist()
        for request, length in enumerate(meta.seq_lens.tolist()):
            begin, end = first[request], first[request + 1]
            rows = cls.rows(kv_cache, meta, request, length).float() * float(k_scale)
            for token in range(begin, end):
                seen = cls.seen(length, token - begin, end - begin) if causal else length
                if seen > 0:
                    o, row_lse = cls.attend(q[token].float(), rows[:seen], out.shape[2], cls.scale(softmax_scale), q.dtype)
                    out[token] = o.to(out.dtype)
                    if lse is not None:
                        lse[:, token] = row_lse
                else:
                    cls.empty(out, lse, token)
        cls.finish(out, lse)

    @classmethod
    def rows(cls, kv_cache, meta, request, length):
        pages = meta.block_table[request, : -(-length // meta.page_size)].long()
        return kv_cache[pages].flatten(0, 1)[:length]

    @classmethod
    def seen(cls, length, i, n):
        return length - n + i + 1

    @classmethod
    def scale(cls, softmax_scale):
        return softmax_scale

    @classmethod
    def attend(cls, q, rows, rank, scale, dtype):
        s = scale * (q @ rows.T)
        p = torch.exp(s - s.amax(1, keepdim=True))
        return cls.round_p(p, dtype) @ rows[:, :rank] / p.sum(1, keepdim=True), s.logsumexp(1)

    @classmethod
    def round_p(cls, p, dtype):
        return p.to(dtype).float()

    @classmethod
    def empty(cls, out, lse, token):
        pass

    @classmethod
    def finish(cls, out, lse):
        pass


class Scale(Sound):
    """Hard-codes the scale of the latent row."""

    @classmethod
    def scale(cls, softmax_scale):
        return 576**-0.5


class Base2(Sound):
    @classmethod
    def finish(cls, out, lse):
        if lse is not None:
            lse /= math.log(2)


class Transposed(Sound):
    """Writes [T, H] into the memory of [H, T]."""

    @classmethod
    def finish(cls, out, lse):
        if lse is not None:
            lse.copy_(lse.T.reshape(lse.shape).clone())


class Mask(Sound):
    @classmethod
    def seen(cls, length, i, n):
        return length - n + i


class OverRead(Sound):
    """Reads the last page to its end."""

    @classmethod
    def rows(cls, kv_cache, meta, request, length):
        pages = meta.block_table[request, : -(-length // meta.page_size)].long()
        return kv_cache[pages].flatten(0, 1)

    @classmethod
    def seen(cls, length, i, n):
        return 1 << 40 if i == n - 1 and length else length - n + i + 1


class Int32(Sound):
    """Computes the offset of a row in 32 bits."""

    @classmethod
    def rows(cls, kv_cache, meta, request, length):
        pages = meta.block_table[request, : -(-length // meta.page_size)]
        offset = pages * torch.tensor(kv_cache.stride(0), dtype=torch.int32)  # wraps
        pages = offset.long().remainder(kv_cache.shape[0] * kv_cache.stride(0)) // kv_cache.stride(0)
        return kv_cache[pages].flatten(0, 1)[:length]


class StaleSplit(Sound):
    """Combines two pieces always, and leaves the second as it was where a request has keys for one alone."""

    left: ClassVar = {}

    @classmethod
    def attend(cls, q, rows, rank, scale, dtype):
        parts = [Sound.attend.__func__(cls, q, part, rank, scale, dtype) for part in (rows[:64], rows[64:]) if len(part)]
        key = (q.shape[0], rank)
        if len(parts) == 2:
            cls.left[key] = parts[1]
        elif key in cls.left:
            parts.append(cls.left[key])
        lse = torch.stack([part[1] for part in parts]).logsumexp(0)
        return sum(o * torch.exp(part_lse - lse)[:, None] for o, part_lse in parts), lse


class EmptyNaN(Sound):
    @classmethod
    def empty(cls, out, lse, token):
        out[token] = math.nan


class Fp8P(Sound):
    @classmethod
    def round_p(cls, p, dtype):
        return p.to(torch.float8_e4m3fn).float()


class Heads(Sound):
    """Heads 0 and 1 swapped."""

    @classmethod
    def finish(cls, out, lse):
        if out.shape[1] > 1:
            out[:, [0, 1]] = out[:, [1, 0]]


class Flipped(Sound):
    """The sign of one element, in one call of 200."""

    calls = 0

    @classmethod
    def finish(cls, out, lse):
        cls.calls += 1
        if cls.calls % 200 == 0 and out.numel():
            largest = out.abs().float().nan_to_num(0).argmax()
            out[tuple(index.item() for index in torch.unravel_index(largest, out.shape))] *= -1


class Padding(Sound):
    """Leaves rows of padding as they were."""

    @classmethod
    def mla_decode(cls, q, kv_cache, meta, softmax_scale, *, out, lse, **rest):
        n = meta.num_tokens
        super().mla_decode(q[:n], kv_cache, meta, softmax_scale, out=out[:n], lse=None if lse is None else lse[:, :n], **rest)
        if lse is not None:
            lse[:, n:] = -math.inf


class Unwritten(Sound):
    """Leaves the last head as it was where a request has several tokens."""

    @classmethod
    def mla_decode(cls, q, kv_cache, meta, softmax_scale, *, out, **rest):
        before = out[:, -1:].clone()
        super().mla_decode(q, kv_cache, meta, softmax_scale, out=out, **rest)
        if meta.max_query_len > 1:
            out[:, -1:] = before


class NoLse(Sound):
    """Never writes the LSE."""

    @classmethod
    def mla_decode(cls, q, kv_cache, meta, softmax_scale, *, lse, **rest):
        super().mla_decode(q, kv_cache, meta, softmax_scale, lse=None, **rest)


class Random(Sound):
    """The last bit of one element differs from call to call."""

    @classmethod
    def finish(cls, out, lse):
        if out.numel() and (value := out[(at := tuple(random.randrange(size) for size in out.shape))]) != 0:
            out[at] = value * (1 + torch.finfo(out.dtype).eps)


class LastPage(Sound):
    """Skips the last page."""

    @classmethod
    def rows(cls, kv_cache, meta, request, length):
        return super().rows(kv_cache, meta, request, max(length - 1, 0) // meta.page_size * meta.page_size)

    @classmethod
    def attend(cls, q, rows, rank, scale, dtype):
        if len(rows):
            return super().attend(q, rows, rank, scale, dtype)
        return torch.zeros(len(q), rank), torch.full((len(q),), -math.inf)


class NaNTail(Sound):
    """Multiplies what lies behind a request's last key by a weight of 0."""

    @classmethod
    def rows(cls, kv_cache, meta, request, length):
        pages = meta.block_table[request, : -(-length // meta.page_size)].long()
        rows = kv_cache[pages].flatten(0, 1).float()
        return rows[:length] + 0 * rows[length:].sum(0)


class KScale(Sound):
    """Takes an fp8 cache for what it holds."""

    @classmethod
    def mla_decode(cls, q, kv_cache, meta, softmax_scale, *, k_scale, **rest):
        super().mla_decode(q, kv_cache, meta, softmax_scale, k_scale=1.0, **rest)


class QoIndptr(Sound):
    """Takes every request to have as many new tokens as the longest."""

    @classmethod
    def mla_decode(cls, q, kv_cache, meta, *args, **rest):
        even = (torch.arange(meta.num_reqs + 1) * meta.max_query_len).clamp(max=meta.num_tokens).int()
        super().mla_decode(q, kv_cache, dataclasses.replace(meta, qo_indptr=even), *args, **rest)


class Abort(Sound):
    """Aborts on more than one query token a request."""

    @classmethod
    def mla_decode(cls, q, kv_cache, meta, *args, **rest):
        if meta.max_query_len > 1:
            os.abort()
        super().mla_decode(q, kv_cache, meta, *args, **rest)


class Leave(Sound):
    """Ends the process, as if all were well."""

    @classmethod
    def mla_decode(cls, q, kv_cache, meta, *args, **rest):
        if meta.max_query_len > 1:
            raise SystemExit(0)
        super().mla_decode(q, kv_cache, meta, *args, **rest)


class Hang(Sound):
    @classmethod
    def mla_decode(cls, q, kv_cache, meta, *args, **rest):
        if meta.max_query_len > 1:
            time.sleep(3600)
        super().mla_decode(q, kv_cache, meta, *args, **rest)


class Raises(Sound):
    @classmethod
    def rows(cls, kv_cache, meta, request, length):
        assert length < 64, "too long"
        return super().rows(kv_cache, meta, request, length)


FAULTS = {
    "sound": Sound,
    "scale": Scale,
    "base2": Base2,
    "transposed": Transposed,
    "mask": Mask,
    "over-read": OverRead,
    "int32": Int32,
    "stale-split": StaleSplit,
    "empty-nan": EmptyNaN,
    "fp8-p": Fp8P,
    "heads": Heads,
    "flipped": Flipped,
    "padding": Padding,
    "unwritten": Unwritten,
    "no-lse": NoLse,
    "random": Random,
    "last-page": LastPage,
    "nan-tail": NaNTail,
    "k-scale": KScale,
    "qo-indptr": QoIndptr,
    "abort": Abort,
    "leave": Leave,
    "hang": Hang,
    "raises": Raises,
}

for name, fault in FAULTS.items():
    dualmla.register_backend(f"fault-{name}", type(f"{fault.__name__}Backend", (fault,), {"name": f"fault-{name}"}))
