"""A DeepSeek-V3 small enough for a CPU, whose attention keeps the real sizes."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch

from dualmla.config import MLAConfig

MINIMUM_TRANSFORMERS = (5, 17)
# A byte is a token: prompts are text, and no tokenizer has to be downloaded.
VOCAB_SIZE = 256
# DeepSeek-V3's published rope settings; with mscale_all_dim the scores are scaled by (0.1 ln 40 + 1)^2 = 1.87 on top of 192^-0.5.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def require_transformers() -> str:
    """The version of the installed transformers.

    Raises:
        ImportError: there is none, or one older than 5.17; names the extra that brings it.
    """
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError("dualmla demo needs transformers, which is not installed: pip install 'dualmla[demo]'") from None
    if tuple(int(part) for part in version.split(".")[:2]) < MINIMUM_TRANSFORMERS:
        raise ImportError(f"dualmla demo needs transformers 5.17 or newer, found {version}: pip install 'dualmla[demo]'")
    return version


def build_model(*, num_heads: int, num_layers: int, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """A `DeepseekV3ForCausalLM` with random weights and the library's eager attention.

    The attention has DeepSeek-V3's sizes (latent 512 + 64, heads 128 + 64 and 128, YaRN factor 40); `num_heads`, the layers,
    the hidden size and the experts are cut down. The first layer's MLP is dense, the others' are mixtures of 8 experts.

    Weights are drawn on the CPU in float32 and rounded to `dtype`, so that a seed means the same model on every device.

    Raises:
        ImportError: see `require_transformers`.
    """
    require_transformers()
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    config = DeepseekV3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        q_lora_rank=192,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        max_position_embeddings=163840,
        rope_parameters=dict(YARN),
    )
    # not `.to(dtype)` afterwards, which would round the rotary frequencies too
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    _draw_weights(model, seed)
    return model.to(device).eval()


def _draw_weights(model: torch.nn.Module, seed: int) -> None:
    """Overwrite every parameter so that the attention matters to the logits.

    The library's own initialisation (deviation 0.02) leaves scores near zero: each head would average its values, and a wrong
    softmax scale would not show. Matrices get deviation 1/sqrt(fan in), which gives scores of deviation 1.9 and logits of deviation
    1; gains of the norms vary, so that one that is left out shows.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.1 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)


def mla_config(model: Any, *, page_size: int) -> MLAConfig:
    """The MLAConfig of a DeepSeek-V3's attention, which is the same in all its layers. `softmax_scale` is the library's."""
    config = model.config
    return MLAConfig(
        num_heads=config.num_attention_heads,
        softmax_scale=model.model.layers[0].self_attn.scaling,
        page_size=page_size,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        dtype=model.dtype,
    )
