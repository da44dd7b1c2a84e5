"""AITER's assembly kernels behind the shared interface. Only this package imports `aiter`, and only after its gates."""

from dualmla.backends.aiter.adapter import AiterMLABackend, AiterMLAImpl

__all__ = ["AiterMLABackend", "AiterMLAImpl"]
