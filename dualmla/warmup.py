"""Before the first request: compile what will run, and say how much memory a step takes beside its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from dualmla.advance import advance_step
from dualmla.attention import MLAImpl, default_workspace_tokens
from dualmla.backends.triton import TritonMLABackend
from dualmla.config import FLOAT8_DTYPES, MLAConfig
from dualmla.metadata import MLAMetadata, MLAMetadataBuilder
from dualmla.selection import select_backend
from dualmla.validation import check_count, checked_device

PROMPT = 64
"""New tokens of the prefills that `warmup` runs, beyond those of a decode: long enough to go the way of prefills."""

SHORT_PROMPT = 48
"""New tokens of prefills that our kernels do in smaller blocks."""

SMALL_TENSORS = 2**16
"""Index tensors of the pieces of context, and what an allocator rounds up: a few hundred bytes each."""


def warmup(
    cfg: MLAConfig, device: torch.device | str, batch_sizes: Sequence[int], *, max_query_len: int = 1, backend: str | None = None
) -> None:
    """Run each kernel of a step once, so that no request waits for a compiler.

    On small tensors of its own: decodes of each batch size, eager and as a graph prepares them, a step on, and prefills
    without and with context.

    Arguments:
        cfg: the layer.
        device: where attention will run; its current stream is used, and waited for.
        batch_sizes: requests of the decodes to come; a captured size and one that is not a multiple of 16 may be compiled
            differently.
        max_query_len: most new tokens of a decode.
        backend: None or "auto" for the selection policy, or a registered name.

    Raises:
        ValueError: a number that is no int of at least 1.
        BackendUnavailable: a forced backend can't be used.
    """
    for i, size in enumerate(batch_sizes):
        check_count(f"batch_sizes[{i}]", size, least=1)
    check_count("max_query_len", max_query_len, least=1)
    device = checked_device(device)
    chosen = select_backend(cfg, device, backend)
    impl = chosen.get_impl_cls()(
        cfg,
        torch.zeros(cfg.num_heads, cfg.qk_nope_head_dim, cfg.kv_lora_rank, dtype=cfg.dtype, device=device),
        torch.zeros(cfg.num_heads, cfg.kv_lora_rank, cfg.v_head_dim, dtype=cfg.dtype, device=device),
    )
    pages = -(-2 * (max_query_len + PROMPT) // cfg.page_size)
    cache = torch.zeros(pages, cfg.page_size, cfg.latent_dim, dtype=torch.float32, device=device).to(cfg.cache_dtype)
    most = max([2, *batch_sizes])
    builder = chosen.get_builder_cls()(
        cfg,
        device,
        max_num_seqs=most,
        max_num_pages_per_seq=pages,
        max_num_tokens=most * (max_query_len + PROMPT),
        decode_threshold=max_query_len,
    )
    state = chosen.get_state_cls()(cfg, device, max_batch_size=most, max_num_pages_per_seq=pages, max_query_len=max_query_len)
    for meta in _batches(builder, batch_sizes, max_query_len, pages):
        _forward(impl, meta, cache)
        if meta.num_prefills == 0:
            with state.graph_capture(meta.num_reqs):
                captured = state.graph_capture_get_metadata_for_batch(meta.num_reqs)
            state.prepare_graph_input_buffers(state.get_graph_input_buffers(captured), meta)
            _forward(impl, captured, cache)
            if meta.max_query_len == 1:
                token = torch.zeros(meta.num_tokens, dtype=torch.int64, device=device)
                advance_step(meta, token, token.clone(), token.clone())
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _batches(builder: MLAMetadataBuilder, batch_sizes: Sequence[int], max_query_len: int, pages: int) -> Iterator[MLAMetadata]:
    """Decodes of each size, all of one length and not; prefills alone and behind a decode, without and with context."""
    long, prompt = 2 * (max_query_len + 1), max_query_len + PROMPT
    batches = [([long] * size, [new] * size) for size in batch_sizes for new in {1, max_query_len}]
    batches += [([long] * size, [1] * (size - 1) + [max_query_len]) for size in batch_sizes if size > 1 and max_query_len > 1]
    # a prompt alone and behind a decode; behind a context shorter and longer than itself, where other kernels may serve it
    batches += [([prompt], [prompt]), ([long, prompt + 1], [1, prompt]), ([2 * prompt], [max_query_len + 1])]
    # prompts that are short, and too long for the little context they have to go the way of decodes
    short = max(SHORT_PROMPT, max_query_len + 1)
    batches += [([short], [short]), ([short + 1], [short])]
    for seq_lens, query_lens in batches:
        table = torch.arange(pages, dtype=torch.int32, device=builder.device).repeat(len(seq_lens), 1)
        lengths = torch.tensor(seq_lens, dtype=torch.int32, device=builder.device)
        yield builder.build(table, lengths, query_lens)


def _forward(impl: MLAImpl, meta: MLAMetadata, cache: torch.Tensor) -> None:
    cfg, tokens, device = impl.cfg, meta.num_tokens, cache.device
    q = torch.zeros(tokens, cfg.num_heads, cfg.qk_head_dim, dtype=cfg.dtype, device=device)
    kv_c = torch.zeros(tokens, cfg.kv_lora_rank, dtype=cfg.dtype, device=device)
    k_pe = torch.zeros(tokens, cfg.qk_rope_head_dim, dtype=cfg.dtype, device=device)
    impl.forward(q, kv_c, k_pe, cache, meta)
    if cfg.cache_dtype in FLOAT8_DTYPES:  # its scale may be a number or lie on the device
        impl.forward(q, kv_c, k_pe, cache, meta, k_scale=torch.ones(1, dtype=torch.float32, device=device))


def workspace_bytes(
    cfg: MLAConfig,
    device: torch.device | str,
    *,
    max_num_tokens: int,
    max_num_seqs: int = 256,
    context_workspace_tokens: int | None = None,
) -> int:
    """Bytes of memory that one `forward` takes at most, at a time, beside its arguments and its output: an upper bound.

    Of the shared forward and our own kernels; scratch that AITER allocates for itself is not in it.

    Arguments:
        cfg: the layer.
        device: where attention will run.
        max_num_tokens: new tokens of a step.
        max_num_seqs: requests of a step.
        context_workspace_tokens: as the impl is given it.

    Raises:
        ValueError: a number that is no int of at least 1.
    """
    for name, value in (("max_num_tokens", max_num_tokens), ("max_num_seqs", max_num_seqs)):
        check_count(name, value, least=1)
    device = checked_device(device)
    chunk = default_workspace_tokens(cfg) if context_workspace_tokens is None else context_workspace_tokens
    tokens, heads, size = max_num_tokens, cfg.num_heads, cfg.dtype.itemsize
    # absorbed queries, beside the parts that they are put together from or the attention over latent rows; prefills may go
    # this way too, so that a request may have all the tokens
    decode = tokens * heads * (cfg.latent_dim + cfg.kv_lora_rank + cfg.v_head_dim) * size
    decode += max(
        TritonMLABackend.decode_scratch_bytes(cfg, device, max_query_len=longest, num_reqs=max_num_seqs) for longest in (1, tokens)
    )
    # keys and values of the new tokens, or of one piece of context, are still there while those of the next are made
    up_projected = heads * (cfg.qk_head_dim + cfg.v_head_dim) * size
    # on a CPU the products copy the latent rows that all heads share
    product = heads * (cfg.kv_lora_rank if device.type == "cpu" else max(cfg.qk_nope_head_dim, cfg.v_head_dim)) * size
    pieces = max(tokens, chunk) * up_projected + chunk * up_projected + max(tokens, chunk) * product + 2 * chunk * cfg.latent_dim * size
    # the new tokens that are keys, the running state in fp32, the part of a piece, and an LSE for each of them
    states = tokens * (8 + heads * (cfg.v_head_dim * (4 + size) + 3 * 4)) + tokens * cfg.latent_dim * size
    # in which order the blocks of 128 queries are done, 8 numbers each, while a piece is attended to
    states += 8 * 4 * (1 + tokens // 128 + max_num_seqs)
    return max(decode, pieces + states) + SMALL_TENSORS
