"""The public functions as operators of torch, so that `torch.compile(fullgraph=True)` of a layer sees each as one node.

An operator's implementation is the function itself, with all its checks; its fake one says what shapes come out. What is no
tensor travels as a handle: a layer as its number, a metadata as its number in a tensor, so that the next batch runs the
<<<<<<< HEAD
same graph. A given `out` tells an operator what its result must look like, and the graph copies it there. Defined with
=======
same graph. A given `out` tells an operator what its result must look like; the graph copies it there. Defined with
>>>>>>> main
`Library.define`, a call costs a few microseconds; `torch.library.custom_op` takes ten times that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dualmla import ops
from dualmla.attention import MLAImpl
from dualmla.metadata import MLAMetadata

_library = torch.library.Library("dualmla", "DEF")  # type: ignore[no-untyped-call]

Operator = Callable[..., Any]


def _define(schema: str, fake: Operator) -> Callable[[Operator], Operator]:
    """The decorated function implements the operator of that schema on every device."""

    def register(implementation: Operator) -> Operator:
        name = schema.partition("(")[0]
        _library.define(schema)  # type: ignore[no-untyped-call]
        _library.impl(name, implementation, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"dualmla::{name}", fake, lib=_library)
        return implementation

    return register


def _listed(result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    """out, or out and LSE, as the list that a schema can name."""
    return [result] if isinstance(result, torch.Tensor) else list(result)


def _like(out: torch.Tensor | None) -> torch.Tensor | None:
    """Memory for the result of an operator that is to be copied into `out`: refused where `out` would be."""
    return None if out is None else torch.empty_like(out)


def _out_and_lse(q: torch.Tensor, dim: int, return_lse: bool, out: torch.Tensor | None) -> list[torch.Tensor]:
    """What attention of the queries [T, H, ...] returns."""
    tokens, heads = q.shape[:2]
    first = q.new_empty(tokens, heads, dim) if out is None else torch.empty_like(out)
    return [first, *([q.new_empty(heads, tokens, dtype=torch.float32)] if return_lse else [])]


def _nothing(*_: Any) -> None:
    """Fake of an operator that only writes into what it was given."""


def _fake_decode(
    q: torch.Tensor, kv_cache: torch.Tensor, meta: torch.Tensor, rank: int, scale: float, causal: bool, return_lse: bool,
    k_scale_tensor: torch.Tensor | None, k_scale: float | None, num_kv_splits: int | None, out: torch.Tensor | None, backend: str | None,
) -> list[torch.Tensor]:  # fmt: skip
    return _out_and_lse(q, rank, return_lse, out)


@_define(
    "mla_decode(Tensor q, Tensor kv_cache, Tensor meta, SymInt kv_lora_rank, float softmax_scale, bool causal, bool return_lse, "
    "Tensor? k_scale_tensor, float? k_scale, int? num_kv_splits, Tensor? out, str? backend) -> Tensor[]",
    fake=_fake_decode,
)
def _decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: torch.Tensor,
    kv_lora_rank: int,
    softmax_scale: float,
    causal: bool,
    return_lse: bool,
    k_scale_tensor: torch.Tensor | None,
    k_scale: float | None,
    num_kv_splits: int | None,
    out: torch.Tensor | None,
    backend: str | None,
) -> list[torch.Tensor]:
    result = ops.mla_decode(
        q,
        kv_cache,
        MLAMetadata.of_handle(meta),
        softmax_scale,
        causal=causal,
        out=q.new_empty(*q.shape[:2], kv_lora_rank) if out is None else torch.empty_like(out),
        return_lse=return_lse,
        k_scale=k_scale if k_scale_tensor is None else k_scale_tensor,
        num_kv_splits=num_kv_splits,
        backend=backend,
    )
    return _listed(result)


def _fake_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, max_q: int, max_k: int, scale: float,
    causal: bool, return_lse: bool, out: torch.Tensor | None, backend: str | None,
) -> list[torch.Tensor]:  # fmt: skip
    return _out_and_lse(q, v.shape[2], return_lse, out)


@_define(
    "mla_prefill(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "float softmax_scale, bool causal, bool return_lse, Tensor? out, str? backend) -> Tensor[]",
    fake=_fake_prefill,
)
def _prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, max_q: int, max_k: int, scale: float,
    causal: bool, return_lse: bool, out: torch.Tensor | None, backend: str | None,
) -> list[torch.Tensor]:  # fmt: skip
    out = _like(out)
    return _listed(
        ops.mla_prefill(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal=causal, out=out, return_lse=return_lse, backend=backend)
    )


@_define(
    "concat_and_cache_mla(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping, Tensor? k_scale_tensor, "
    "float? k_scale, str? backend) -> ()",
    fake=_nothing,
)
def _concat_and_cache(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, k_scale_tensor: torch.Tensor | None,
    k_scale: float | None, backend: str | None,
) -> None:  # fmt: skip
    scale = k_scale if k_scale_tensor is None else k_scale_tensor
    ops.concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, k_scale=scale, backend=backend)


@_define(
    "gather_kv_cache(Tensor kv_cache, Tensor block_table, Tensor cu_seqlens, Tensor seq_starts, Tensor(a!) out, "
    "Tensor? k_scale_tensor, float? k_scale, str? backend) -> ()",
    fake=_nothing,
)
def _gather(
    kv_cache: torch.Tensor, block_table: torch.Tensor, cu_seqlens: torch.Tensor, seq_starts: torch.Tensor, out: torch.Tensor,
    k_scale_tensor: torch.Tensor | None, k_scale: float | None, backend: str | None,
) -> None:  # fmt: skip
    scale = k_scale if k_scale_tensor is None else k_scale_tensor
    ops.gather_kv_cache(kv_cache, block_table, cu_seqlens, seq_starts, out, k_scale=scale, backend=backend)


def _fake_merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor, out: torch.Tensor | None, backend: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    merged = out_a.new_empty(out_a.shape, dtype=torch.promote_types(out_a.dtype, out_b.dtype)) if out is None else torch.empty_like(out)
    return merged, lse_a.new_empty(lse_a.shape)


@_define(
    "merge_attn_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor? out, str? backend) -> (Tensor, Tensor)",
    fake=_fake_merge,
)
def _merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor, out: torch.Tensor | None, backend: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.merge_attn_states(out_a, lse_a, out_b, lse_b, out=_like(out), backend=backend)


@_define(
    "mla_forward(Tensor q, Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor(b!) output, SymInt layer, Tensor meta, "
    "Tensor? k_scale_tensor, float? k_scale) -> ()",
    fake=_nothing,
)
def _forward(
    q: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor, layer: int,
    meta: torch.Tensor, k_scale_tensor: torch.Tensor | None, k_scale: float | None,
) -> None:  # fmt: skip
    scale = k_scale if k_scale_tensor is None else k_scale_tensor
    MLAImpl.of_handle(layer).forward(q, kv_c, k_pe, kv_cache, MLAMetadata.of_handle(meta), k_scale=scale, output=output)
