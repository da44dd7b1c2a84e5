"""Which AITER this is, read from the signature of its `mla_decode_fwd` and never from its version.

The function changed nine times in eighteen months, backports interleave with releases, and `aiter.__version__` is None.
Every argument is passed by keyword, so the order of parameters (`page_size` was once inserted in the middle) is no
concern: what counts is which names there are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from dualmla.backends.aiter.planner import Planner, find_planner
from dualmla.backends.aiter.prefill import PASSED as PREFILL_PASSED

# What each generation added, oldest first. S6 added no parameter: there the LSE is really written.
MARKERS = (
    ("S1", "max_seqlen_q"),  # 2025-04; before it one query token a request, and no qo_indptr
    ("S2", "work_meta_data"),  # 2025-11, the release on PyPI: persistent mode
    ("S3", "intra_batch_mode"),  # 2025-12: the caller's num_kv_splits_indptr is honoured
    ("S4", "return_lse"),
    ("S5", "page_size"),  # 2026-02
    ("S7", "g_kv_indptr"),  # 2026-06
    ("S8", "causal"),  # 2026-08
)
GENERATIONS = ("S0", "S1", "S2", "S3", "S4", "S5", "S6", "S7", "S8")

ALWAYS_PASSED = ("q", "kv_buffer", "o", "kv_indptr", "kv_indices", "kv_last_page_lens", "sm_scale", "num_kv_splits")
PASSED_WHERE_KNOWN = ("qo_indptr", "max_seqlen_q", "num_kv_splits_indptr", "page_size", "return_lse", "causal")
PERSISTENT = (
    "work_meta_data", "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map", "q_scale", "kv_scale",
)  # fmt: skip
"""What a persistent decode is passed beside: the plan, and the scales of a float8 cache."""


class UnknownSignature(ValueError):  # noqa: N818 - a finding about somebody else's code, not a mistake of the caller
    """`mla_decode_fwd` is none of the generations that the adapter knows; the message says how it differs."""


@dataclass(frozen=True)
class Signature:
    """What can be passed to this `mla_decode_fwd`.

    Attributes:
        generation: "S0" to "S8".
        parameters: the names it takes.
        writes_lse: its second stage stores the LSE of a non-persistent decode; before, the memory returned was never written.
        persistent: it takes a plan, and the release has functions that make one in a form that we know.
    """

    generation: str
    parameters: frozenset[str]
    writes_lse: bool
    persistent: bool = False

    @property
    def honours_split_indptr(self) -> bool:
        """The caller's `num_kv_splits_indptr` is used. S2 has the parameter and overwrites it."""
        return "intra_batch_mode" in self.parameters


@dataclass(frozen=True)
class Aiter:
    """An imported AITER.

    Attributes:
        decode: `aiter.mla.mla_decode_fwd`.
        signature: what `decode` takes.
        version: of the distribution, for messages alone.
        forget_splits: empties the cache that holds the split indptr of the last call; None where there is none.
        attention: `aiter.flash_attn_varlen_func`; None where there is none that takes what we pass.
        planner: what plans persistent decodes; None where `signature.persistent` is False.
    """

    decode: Callable[..., Any]
    signature: Signature
    version: str
    forget_splits: Callable[[], None] | None
    attention: Callable[..., Any] | None
    planner: Planner | None


def read_signature(parameters: Iterable[inspect.Parameter], *, writes_lse: bool, plans: bool = False) -> Signature:
    """The generation of a `mla_decode_fwd` with these parameters.

    Arguments:
        parameters: of the function, as `inspect.signature` gives them.
        writes_lse: whether its second stage takes `Final_lse`.
        plans: whether there are functions that plan a persistent decode.

    Raises:
        UnknownSignature: a parameter that we pass is missing, or one without a default is new.
    """
    parameters = list(parameters)
    names = frozenset(parameter.name for parameter in parameters)
    if missing := [name for name in ALWAYS_PASSED if name not in names]:
        raise UnknownSignature(f"its mla_decode_fwd has no parameter {', '.join(missing)}")
    if ("qo_indptr" in names) != ("max_seqlen_q" in names):
        raise UnknownSignature("its mla_decode_fwd has only one of the parameters qo_indptr and max_seqlen_q")
    needed = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if unknown := [name for name in needed if name not in ALWAYS_PASSED + PASSED_WHERE_KNOWN]:
        raise UnknownSignature(f"its mla_decode_fwd demands {', '.join(unknown)}, which this adapter does not know")
    generation = "S0"
    for name, marker in MARKERS:
        if marker in names:
            generation = name
    if generation == "S5" and writes_lse:
        generation = "S6"
    return Signature(generation, names, writes_lse and "return_lse" in names, plans and names.issuperset(PERSISTENT))


def describe(package: ModuleType, mla: ModuleType, version: str) -> Aiter:
    """The imported modules `aiter` and `aiter.mla` as the adapter uses them.

    Raises:
        UnknownSignature: as `read_signature`.
    """
    second_stage, planner = getattr(mla, "_fwd_kernel_stage2_asm", None), find_planner(package)
    signature = read_signature(
        inspect.signature(mla.mla_decode_fwd).parameters.values(),
        writes_lse="Final_lse" in getattr(second_stage, "arg_names", ()),
        plans=planner is not None,
    )
    forget = getattr(getattr(mla, "get_meta_param", None), "cache_clear", None)
    attention = getattr(package, "flash_attn_varlen_func", None)
    if attention is not None and not set(PREFILL_PASSED) <= set(inspect.signature(attention).parameters):
        attention = None
    return Aiter(mla.mla_decode_fwd, signature, version, forget, attention, planner if signature.persistent else None)
