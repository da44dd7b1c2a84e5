"""One decode step on: the metadata of a batch moved to its next token where it lies, without the host."""

from __future__ import annotations

import torch

from dualmla.buffers import advance
from dualmla.metadata import MLAMetadata
from dualmla.validation import check_tensor

TOKEN_DTYPES = (torch.int32, torch.int64)


def advance_step(meta: MLAMetadata, sampled_token_ids: torch.Tensor, input_tokens: torch.Tensor, input_positions: torch.Tensor) -> None:
    """Move a batch of decodes one token on, in place: what building it again with every `seq_lens` one larger gives.

    Lengths, page ids, last page lengths, slots and the split plan follow; the block table must already hold the page that a
    request steps into. Requests without a new token (padding of a captured batch) stay as they are. On a GPU two launches,
    which may be captured: nothing waits and nothing is allocated.

    Arguments:
        meta: of decodes alone, one new token each.
        sampled_token_ids: int32 or int64 [>= T] or [>= T, 1], T = `meta.num_tokens`: what token t was answered with.
        input_tokens: int32 or int64 [>= T], written: the sampled tokens are the next inputs.
        input_positions: int32 or int64 [>= T], written: the position of each, its sequence's old length.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed; nothing is written then.
        RuntimeError: the metadata is stale.
    """
    if not isinstance(meta, MLAMetadata):
        raise TypeError(f"meta must be MLAMetadata, got {type(meta).__name__}")
    meta.check_current()
    buffers = meta.buffers
    if meta.num_prefills or buffers is None:
        raise ValueError(f"meta must be of decodes alone, it holds or belongs to a batch of {meta.num_decodes} decodes and prefills")
    if meta.max_query_len > 1:
        raise ValueError(f"meta must be of one new token a request, it holds up to {meta.max_query_len}")
    if isinstance(sampled_token_ids, torch.Tensor) and sampled_token_ids.dim() == 2 and sampled_token_ids.shape[1] == 1:
        sampled_token_ids = sampled_token_ids[:, 0]
    for name, tensor in (
        ("sampled_token_ids", sampled_token_ids),
        ("input_tokens", input_tokens),
        ("input_positions", input_positions),
    ):
        check_tensor(name, tensor, rank=1, dtypes=TOKEN_DTYPES, device=meta.device, dense=name != "sampled_token_ids")
        if tensor.shape[0] < meta.num_tokens:
            raise ValueError(f"{name} has {tensor.shape[0]} entries, the batch has {meta.num_tokens} tokens")
    if meta.num_reqs == 0:
        return
    advance(meta.seq_lens, meta.query_lens, meta.qo_indptr, sampled_token_ids, input_tokens, input_positions)
    buffers.write(
        meta.block_table,
        meta.seq_lens,
        meta.query_lens,
        num_reqs=meta.num_reqs,
        num_decodes=meta.num_reqs,
        num_tokens=meta.num_tokens,
        plan=meta.plan,
    )
