"""Fine-tune a model in NVFP4: load plain weights, convert, train, save plain weights. Runs on a CPU in seconds.

    python examples/finetune.py [--steps 60] [--adapters]

The base model has learned to count up by one; fine-tuning teaches it to count by three. With --adapters its weights
stay frozen in FP4 products and only low-rank adapters and norms learn.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fp4engine

VOCABULARY, WIDTH, LENGTH = 24, 64, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Plain PyTorch: nothing in it knows of FP4."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Adapter(nn.Module):
    """A frozen linear module and a low-rank update beside it."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def train(model: nn.Module, stride: int, steps: int, *, fp4: bool) -> list[float]:
    """Train on sequences that count by ``stride``; returns the loss of every step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    losses = []
    for _ in range(steps):
        start = torch.randint(VOCABULARY, (16, 1))
        tokens = (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY
        with fp4engine.autocast(enabled=fp4):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(arguments: list[str] | None = None) -> tuple[float, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="steps of fine-tuning (default 60)")
    parser.add_argument("--adapters", action="store_true", help="freeze the base and train low-rank adapters")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    torch.manual_seed(0)
    fp4engine.manual_seed(0)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"

        # A base model from somewhere else: plain weights in a plain file.
        base = Model()
        train(base, stride=1, steps=40, fp4=False)
        save_file(base.state_dict(), file)

        # Load it, swap the linear layers in place, and keep the head in high precision.
        model = Model()
        model.load_state_dict(load_file(file))
        plan = fp4engine.convert(model, keep_high_precision=["head"])
        print(plan)
        if options.adapters:
            for block in model.blocks:
                block.up, block.down = Adapter(block.up), Adapter(block.down)

        losses = train(model, stride=3, steps=options.steps, fp4=True)
        step = lambda: train(model, stride=3, steps=1, fp4=True)
        fp4engine.assert_quantized(model, step, min_fraction=0.5)  # of all products, adapters and head included
        print(f"\nloss {losses[0]:.3f} -> {losses[-1]:.3f}")
        print(fp4engine.executed_gemms(model))

        # What is saved has the keys of the plain model and loads into it.
        if not options.adapters:
            save_file(model.state_dict(), file)
            Model().load_state_dict(load_file(file), strict=True)
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
