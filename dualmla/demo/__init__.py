"""`dualmla demo`: a DeepSeek-V3 decoding through dualmla, beside transformers' own attention (extra `demo`)."""

from dualmla.demo.runner import run

__all__ = ["run"]
