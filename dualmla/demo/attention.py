"""A transformers DeepSeek-V3 whose attention is dualmla's."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from dualmla.backends.base import MLABackend
from dualmla.config import MLAConfig
from dualmla.metadata import MLAMetadata


class DualMLAAttention(nn.Module):
    """Stands in for `DeepseekV3Attention`, on the same weights.

    The library's module keeps the projections into and out of the attention, the norms and the rotation; what lies between,
    the cache included, is dualmla's `impl.forward`. Tokens of all requests lie flat in a batch of one.

    Arguments:
        source: the library's module; its parameters are used, not copied.
        config: sizes and softmax scale of `source`.
        backend: what `dualmla.select_backend` returned for `config`.
        kv_cache: the layer's latent cache [num_pages, page_size, 576], written in place.
        context_workspace_tokens: as in `dualmla.attention.MLAImpl`.
    """

    def __init__(
        self, source: Any, config: MLAConfig, backend: type[MLABackend], kv_cache: Tensor, context_workspace_tokens: int | None
    ) -> None:
        super().__init__()
        self.source = source
        self.config = config
        self.kv_cache = kv_cache
        # kv_b_proj holds, for each head, the rows that make its key from the latent, then those that make its value
        expand = source.kv_b_proj.weight.detach().view(config.num_heads, -1, config.kv_lora_rank)
        w_uk, w_uv = expand.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        self.impl = backend.get_impl_cls()(
            config, w_uk.contiguous(), w_uv.transpose(1, 2).contiguous(), context_workspace_tokens=context_workspace_tokens
        )

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *, mla_metadata: MLAMetadata, **library: object
    ) -> tuple[Tensor, None]:
        """Attend as the metadata says.

        Arguments:
            hidden_states: [1, T, hidden_size], the new tokens of all requests.
            position_embeddings: cosine and sine [1, T, 64] at the tokens' positions.
            mla_metadata: built for these T tokens; reaches this method as a keyword of the model's own call.
            library: mask, cache and flags of the library's attention, which have no part here.

        Returns:
            [1, T, hidden_size], and None where the library returns attention weights.
        """
        from transformers.models.deepseek_v3 import modeling_deepseek_v3

        source, config = self.source, self.config
        num_tokens = hidden_states.shape[1]
        q = source.q_b_proj(source.q_a_layernorm(source.q_a_proj(hidden_states)))
        q_nope, q_pe = q.view(1, num_tokens, config.num_heads, -1).split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        kv_c, k_pe = source.kv_a_proj_with_mqa(hidden_states).split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)

        interleaved = source.config.rope_interleave
        rotate = modeling_deepseek_v3.apply_rotary_pos_emb_interleave if interleaved else modeling_deepseek_v3.apply_rotary_pos_emb
        q_pe, k_pe = rotate(q_pe, k_pe.unsqueeze(2), *position_embeddings, unsqueeze_dim=2)

        attended = self.impl.forward(
            torch.cat([q_nope, q_pe], dim=-1)[0], source.kv_a_layernorm(kv_c)[0], k_pe[0, :, 0], self.kv_cache, mla_metadata
        )
        return source.o_proj(attended[None]), None


def with_dualmla(
    model: Any, config: MLAConfig, backend: type[MLABackend], *, num_pages: int, context_workspace_tokens: int | None = None
) -> Any:
    """A copy of a `DeepseekV3ForCausalLM` that attends through `backend`; parameters are shared, `model` is left as it was.

    Each layer gets a cache of `num_pages` pages full of NaN: a row that is read before it was written shows in every logit.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    patched = copy.deepcopy(model, shared)
    for layer in patched.model.layers:
        shape = (num_pages, config.page_size, config.latent_dim)
        kv_cache = torch.full(shape, float("nan"), dtype=config.cache_dtype, device=model.device)
        layer.self_attn = DualMLAAttention(layer.self_attn, config, backend, kv_cache, context_workspace_tokens)
    return patched
