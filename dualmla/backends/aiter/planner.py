"""AITER's two functions that plan a persistent decode: which compute unit attends over which keys of which request.

`get_mla_metadata_info_v1` says how large the plan is, `get_mla_metadata_v1` writes it on the device. Arguments of the second grew
from 16 to 28: `kv_last_page_lens` was inserted as the third, `page_size` before `kv_granularity`, dtypes and more behind. Releases of
2025 name `work_indptr` and `work_info` the other way round than the C++ behind them takes them; by position the order has always
been one. So what every release demands goes by position, and all else by keyword where it is known.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

HEADS = 16
"""Of the one problem that plans are made for: one query token of 16 heads. More heads are more launches with the same plan."""

KV_GRANULARITY = 16
"""Keys that requests are cut at multiples of: the block of the kernel."""

DEMANDED = (
    "seqlens_qo_indptr", "seqlens_kv_indptr", "num_heads_per_head_k", "num_heads_k", "is_causal", "work_metadata_ptrs",
    "work_", "work_", "reduce_indptr", "reduce_final_map", "reduce_partial_map",
)  # fmt: skip
"""Parameters of `get_mla_metadata_v1` that have no default, in order; of the two in the middle the names are exchanged in places."""

INSERTED = "kv_last_page_lens"


@dataclass(frozen=True)
class Tables:
    """A plan on the device, as AITER reads it; sizes and dtypes are AITER's."""

    work_meta_data: torch.Tensor
    work_indptr: torch.Tensor
    work_info_set: torch.Tensor
    reduce_indptr: torch.Tensor
    reduce_final_map: torch.Tensor
    reduce_partial_map: torch.Tensor


@dataclass(frozen=True)
class Planner:
    """The two functions of one release.

    Attributes:
        sizes: `get_mla_metadata_info_v1`.
        write: `get_mla_metadata_v1`.
        takes: the names of what `write` takes.
    """

    sizes: Callable[..., Any]
    write: Callable[..., Any]
    takes: tuple[str, ...]

    def tables(self, num_reqs: int, dtype: torch.dtype, kv_cache_dtype: torch.dtype, device: torch.device) -> Tables:
        """Memory for plans of up to `num_reqs` requests of one query token."""
        sizes = self.sizes(num_reqs, 1, HEADS, dtype, kv_cache_dtype, False)
        return Tables(*(torch.empty(shape, dtype=of, device=device) for shape, of in sizes))

    def plan(
        self,
        tables: Tables,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        last_page_lens: torch.Tensor,
        dtype: torch.dtype,
        kv_cache_dtype: torch.dtype,
    ) -> None:
        """Plan a batch of one query token a request, each with one key or more, without a wait for the device.

        Arguments:
            tables: written; of as many requests at least.
            qo_indptr, kv_indptr: int32 [n + 1], contiguous.
            last_page_lens: int32 [n], ones.
        """
        options = {
            "page_size": 1,
            "kv_granularity": KV_GRANULARITY,
            "max_seqlen_qo": 1,
            "uni_seqlen_qo": 1,
            "fast_mode": True,
            "dtype_q": dtype,
            "dtype_kv": kv_cache_dtype,
        }
        if "dtype_q" not in self.takes:
            options |= {"dtype_q_nope": dtype, "dtype_q_rope": dtype, "dtype_kv_nope": kv_cache_dtype, "dtype_kv_rope": kv_cache_dtype}
        self.write(
            qo_indptr,
            kv_indptr,
            *([last_page_lens] if INSERTED in self.takes else []),
            HEADS,
            1,
            True,
            tables.work_meta_data,
            tables.work_info_set,
            tables.work_indptr,
            tables.reduce_indptr,
            tables.reduce_final_map,
            tables.reduce_partial_map,
            **{name: value for name, value in options.items() if name in self.takes},
        )


def find_planner(package: ModuleType) -> Planner | None:
    """What the imported `aiter` plans with; None where it has no such functions, or of a form that we do not know."""
    sizes, write = (getattr(package, name, None) for name in ("get_mla_metadata_info_v1", "get_mla_metadata_v1"))
    if sizes is None or write is None:
        return None
    parameters = _parameters(write)
    demanded = [name for name, optional in parameters if not optional]
    if INSERTED in demanded[2:3]:
        demanded.remove(INSERTED)
    known = len(demanded) == len(DEMANDED) and all(map(str.startswith, demanded, DEMANDED))
    return Planner(sizes, write, tuple(name for name, _ in parameters)) if known else None


def _parameters(function: Callable[..., Any]) -> list[tuple[str, bool]]:
    """Name of each parameter and whether it has a default. A compiled function of AITER has no signature of its own, its operator has."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        operator = getattr(torch.ops.aiter, "get_mla_metadata_v1", None)
        arguments = operator.default._schema.arguments if operator is not None else ()
        return [(argument.name, argument.has_default_value()) for argument in arguments]
    return [(parameter.name, parameter.default is not parameter.empty) for parameter in parameters]
