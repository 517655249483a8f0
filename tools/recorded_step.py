"""One training step of a GPT, recorded, and the products of its layers, repeated elsewhere from the record.

    python tools/recorded_step.py record step.pt --model 10m --steps 300    each layer's x, w and dy, into one file
    python tools/recorded_step.py multiply step.pt [--device cuda]          digests of each layer's y, dx and dw

Under `accumulation="blackwell"` the digests are the same on every machine, with any number of threads: run `multiply`
on two machines and compare what it prints. Attention, norms and losses differ from machine to machine in their last
bits, so a step is recorded once, and casts and products are what is compared.
"""

import argparse
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

import fp4engine
from fp4engine.recipe import NVFP4BlockScaling

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt.data import load_corpus
from gpt.model import GPT
from gpt.training import make_optimizer

MODELS = {"tiny": (1, 64, 256, 2), "3m": (4, 256, 256, 4), "10m": (6, 384, 512, 4)}
"""Layers, width, length of a sequence, and how many sequences."""
RECIPE = NVFP4BlockScaling(accumulation="blackwell")
LEARNING_RATE = 1e-3


def record(path: Path, model: str, device: str, steps: int = 0) -> None:
    """Save ``{layer: (x, w, dy)}`` of one forward and backward, after ``steps`` steps without casts."""
    layers, width, length, sequences = MODELS[model]
    torch.manual_seed(0)
    fp4engine.manual_seed(0)
    gpt = GPT(layers, width, length)
    fp4engine.convert(gpt, keep_high_precision=["lm_head"])
    gpt.to(device)
    corpus, optimizer = load_corpus("", length + 1, torch.device(device)), make_optimizer(gpt)
    for step in tqdm(range(steps), disable=None):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20)
        optimizer.zero_grad()
        gpt.loss(corpus.batch(step, sequences, length + 1, seed=0)).backward()
        optimizer.step()
    tensors: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def watch(name: str, layer: nn.Linear) -> None:
        def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            x = inputs[0].detach().flatten(0, -2).bfloat16().cpu()
            output.register_hook(
                lambda dy: tensors.update({name: (x, layer.weight.detach().cpu(), dy.flatten(0, -2).bfloat16().cpu())})
            )

        layer.register_forward_hook(keep)

    for name, layer in gpt.named_modules():
        if isinstance(layer, fp4engine.Linear):
            watch(name, layer)
    gpt.zero_grad()
    tokens = corpus.batch(steps, sequences, length + 1, seed=0)
    with fp4engine.autocast(recipe=RECIPE), torch.autocast(device, torch.bfloat16):
        loss = gpt.loss(tokens)
    loss.backward()
    torch.save(dict(sorted(tensors.items())), path)


def products(path: Path, device: str) -> Iterator[tuple[str, str]]:
    """``("layer tensor", SHA-256 of its bytes)`` of every layer's output and gradients."""
    fp4engine.manual_seed(0)
    for name, (x, w, dy) in torch.load(path, weights_only=True).items():
        layer = fp4engine.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype, device=device)
        with torch.no_grad():
            layer.weight.copy_(w)
        inp = x.to(device).requires_grad_()
        with fp4engine.autocast(recipe=RECIPE):
            y = layer(inp)
        y.backward(dy.to(device))
        for label, tensor in (("y", y.detach()), ("dx", inp.grad), ("dw", layer.weight.grad)):
            assert tensor is not None
            yield f"{name} {label}", hashlib.sha256(bytes(tensor.cpu().view(torch.uint8).flatten().numpy())).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "multiply"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--model", choices=MODELS, default="10m", help="what is recorded (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=0, help="steps before the one that is recorded")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of PyTorch on the CPU")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.what == "record":
        return record(arguments.path, arguments.model, arguments.device, arguments.steps)
    whole = hashlib.sha256()
    for label, digest in products(arguments.path, arguments.device):
        whole.update(digest.encode())
        print(digest[:16], label)
    print(whole.hexdigest(), "all")


if __name__ == "__main__":
    main()
