"""How many positions a model is said to have is how many it takes."""

import math

import pytest
import torch
import transformers

from fp4engine.positions import positions_of

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48,
    "max_position_embeddings": 16, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
FAMILIES = {
    "gpt2": ({}, 16),
    "openai-gpt": ({}, 16),
    "opt": ({"ffn_dim": 48, "word_embed_proj_dim": 32}, 16),
    "bert": ({"is_decoder": True}, 16),
    "roberta": ({"is_decoder": True}, 14),
    "ctrl": ({"dff": 48}, 16),
    "gptj": ({"rotary_dim": 8}, 16),
    "llama": ({}, math.inf),
    "bloom": ({"n_layer": 1, "n_head": 2}, math.inf),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_takes_as_many_tokens_as_it_has_positions(family: str) -> None:
    sizes, expected = FAMILIES[family]
    config = transformers.AutoConfig.for_model(family, **SIZES, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    found = positions_of(model)
    assert found == expected
    longest = int(min(found, 40))
    with torch.no_grad():
        model(input_ids=torch.full((1, longest), 5))
        if math.isfinite(found):
            with pytest.raises((IndexError, RuntimeError)):
                model(input_ids=torch.full((1, longest + 1), 5))
