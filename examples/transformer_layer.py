"""A small language model of TransformerLayers, as one writes it for TransformerEngine. Runs on a CPU in seconds.

    python examples/transformer_layer.py [--steps 40] [--layers 2]

Shows what a training loop needs: a recipe, gradient accumulation with weights quantized once, activation checkpointing,
clipping, and an evaluation that leaves the training run as it was.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp4engine as te  # import transformer_engine.pytorch as te
from fp4engine.recipe import NVFP4BlockScaling  # from transformer_engine.common.recipe import NVFP4BlockScaling

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 24, 64, 4, 16, 8


class LanguageModel(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                WIDTH,
                2 * WIDTH,
                HEADS,
                num_gqa_groups=2,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                normalization="RMSNorm",
                activation="swiglu",
                bias=False,
                fuse_qkv_params=True,
                attn_input_format="bshd",
                name=f"layers.{index}",
            )
            for index in range(layers)
        )
        self.norm = te.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)  # an nn.Linear stays in high precision
        self.register_buffer("angles", rotary_angles(LENGTH, WIDTH // HEADS), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = te.checkpoint(layer, x, rotary_pos_emb=self.angles, use_reentrant=False)
        return self.head(self.norm(x))


def rotary_angles(length: int, size: int) -> Tensor:
    """[length, 1, 1, size]: position times frequency, each angle twice."""
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(length)[:, None] * frequencies
    return torch.cat((angles, angles), dim=-1)[:, None, None]


def batch() -> Tensor:
    """Sequences that count by one, two or three."""
    start, stride = torch.randint(VOCABULARY, (BATCH, 1)), torch.randint(1, 4, (BATCH, 1))
    return (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY


def loss_of(model: nn.Module, tokens: Tensor, recipe: NVFP4BlockScaling) -> Tensor:
    with te.autocast(enabled=True, recipe=recipe):
        logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def main(arguments: list[str] | None = None) -> tuple[float, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default 40)")
    parser.add_argument("--layers", type=int, default=2, help="transformer layers (default 2)")
    options = parser.parse_args(arguments)
    if min(options.steps, options.layers) < 1:
        parser.error(f"--steps and --layers must be at least 1, got {options.steps} and {options.layers}")
    torch.manual_seed(0)
    te.manual_seed(0)

    recipe = NVFP4BlockScaling()
    print(recipe)
    model = LanguageModel(options.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    held_out = batch()
    with torch.no_grad():
        before = loss_of(model, held_out, recipe).item()
    for _ in range(options.steps):
        with te.weight_cache(model):  # two microbatches, every weight quantized once
            for _ in range(2):
                (loss_of(model, batch(), recipe) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        after = loss_of(model, held_out, recipe).item()
    print(f"loss on held-out sequences {before:.3f} -> {after:.3f}\n")
    print(te.executed_gemms(model))
    te.assert_quantized(model, keep_high_precision=["head"])  # everything ran in FP4 but the head, a plain nn.Linear
    return before, after


if __name__ == "__main__":
    main()
