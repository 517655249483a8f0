"""Tiny models of transformers from their configurations, and tokens for them: what tests convert, train and export."""

from typing import Any

import pytest
import torch

import fp4engine

transformers = pytest.importorskip("transformers", reason="needs transformers")

VOCABULARY = 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LONGER = SIZES | {"max_position_embeddings": 64, "pad_token_id": 0}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}

CONFIGURATIONS = {
    "llama": lambda: transformers.LlamaConfig(**LONGER),
    "qwen2": lambda: transformers.Qwen2Config(**LONGER),  # biases on q, k, v
    "gemma2": lambda: transformers.Gemma2Config(**LONGER, head_dim=16),
    "phi3": lambda: transformers.Phi3Config(**LONGER),  # fused qkv and gate/up
    "gpt2": lambda: transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**{k: v for k, v in LONGER.items() if "value" not in k}),
    "mixtral": lambda: transformers.MixtralConfig(**LONGER, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**LONGER, **EXPERTS, num_experts=4, head_dim=16),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **LONGER | {"num_key_value_heads": 4},
        **EXPERTS,
        **LATENT,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(**LONGER, num_local_experts=4, num_experts_per_tok=2, head_dim=16),
}
MORE_CONFIGURATIONS = {
    "qwen3": lambda: transformers.Qwen3Config(**LONGER, head_dim=16),
    "t5": lambda: transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
    ),
    "bert": lambda: transformers.BertConfig(**{k: v for k, v in LONGER.items() if "value" not in k}),
    "whisper": lambda: transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=16,
        max_source_positions=32,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    ),
}
"""Architectures that servers and exports meet beside ``CONFIGURATIONS``, some without a causal head."""
WITH_EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")


def llama(**changes: Any) -> Any:
    """A ``LlamaForCausalLM`` with its head apart, in training mode."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | {"tie_word_embeddings": False} | changes))


def architecture(name: str) -> Any:
    """One of ``CONFIGURATIONS``, in evaluation mode."""
    # PyTorch's counter has no formula for the fused attention of CPUs.
    return transformers.AutoModelForCausalLM.from_config(CONFIGURATIONS[name](), attn_implementation="eager").eval()


def served_architecture(name: str) -> Any:
    """One of ``CONFIGURATIONS`` or ``MORE_CONFIGURATIONS`` with the head that it is served with, in evaluation mode."""
    kinds = {
        "t5": "T5ForConditionalGeneration",
        "bert": "BertForMaskedLM",
        "whisper": "WhisperForConditionalGeneration",
    }
    if name in kinds:
        return getattr(transformers, kinds[name])(MORE_CONFIGURATIONS[name]()).eval()
    config = (CONFIGURATIONS | MORE_CONFIGURATIONS)[name]()
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def head(model: Any) -> list[str]:
    """The pattern that keeps the model's head."""
    (name,) = [n for n, module in model.named_modules() if module is model.get_output_embeddings()]
    return [name]


def converted(model: Any, recipe: Any) -> Any:
    """``model`` by a recipe, and its head in high precision."""
    fp4engine.convert(model, recipe, keep_high_precision=head(model))
    return model


def tokens(rows: int = 4) -> torch.Tensor:
    """int64 [rows, 12], different in every row, below ``VOCABULARY`` and no padding."""
    return (torch.arange(12) + 7 * torch.arange(rows)[:, None]) % (VOCABULARY - 1) + 1
