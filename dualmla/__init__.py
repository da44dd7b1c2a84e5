"""One MLA backend interface with two implementations: AITER for production, Triton as oracle and fallback.

Importing this package needs torch alone, touches no device and reads no environment variable.
"""

from dualmla import library  # noqa: F401 - defines torch.ops.dualmla
from dualmla.advance import advance_step
from dualmla.backends.aiter import AiterMLABackend, AiterMLAImpl
from dualmla.backends.base import BackendReport, BackendUnavailable, MLABackend
from dualmla.backends.reference import ReferenceMLABackend, ReferenceMLAImpl
from dualmla.backends.triton import TritonMLABackend, TritonMLAImpl
from dualmla.config import MLAConfig
from dualmla.graph import DecodeGraphs, MLAGraphState
from dualmla.metadata import MLAMetadata, MLAMetadataBuilder, decode_metadata
from dualmla.ops import concat_and_cache_mla, gather_kv_cache, merge_attn_states, mla_decode, mla_prefill
from dualmla.selection import explain, is_aiter_mla_enabled, register_backend, select_backend
from dualmla.warmup import warmup, workspace_bytes

__version__ = "0.1.0"

__all__ = [
    "AiterMLABackend",
    "AiterMLAImpl",
    "BackendReport",
    "BackendUnavailable",
    "DecodeGraphs",
    "MLABackend",
    "MLAConfig",
    "MLAGraphState",
    "MLAMetadata",
    "MLAMetadataBuilder",
    "ReferenceMLABackend",
    "ReferenceMLAImpl",
    "TritonMLABackend",
    "TritonMLAImpl",
    "advance_step",
    "concat_and_cache_mla",
    "decode_metadata",
    "explain",
    "gather_kv_cache",
    "is_aiter_mla_enabled",
    "merge_attn_states",
    "mla_decode",
    "mla_prefill",
    "register_backend",
    "select_backend",
    "warmup",
    "workspace_bytes",
]
