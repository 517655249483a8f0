"""Norm, feed-forward block and a whole layer of Llama-3-8B, forward and backward, beside BF16 in the same run.

    python benchmarks/block.py [--quick] [--out benchmarks/results]

8,192 tokens, hidden size 4,096, RMSNorm, SwiGLU to 14,336, no biases, BF16 parameters and activations. Rows:

    bf16     plain PyTorch modules one after the other: the denominator of every ratio
    parts    the same composition of fp4engine.RMSNorm and fp4engine.Linear, default recipe
    module   LayerNormLinear, LayerNormMLP or TransformerLayer, default recipe

The modules' bytes are held to the parts on the reference quantizers before anything is timed.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import environment, repeats_for, time_in_turn
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fp4engine
from fp4engine.quantizers import reference_quantizer
from fp4engine.recipe import CustomRecipe, NVFP4BlockScaling

RECIPE = NVFP4BlockScaling()
BATCH, SEQUENCE, HIDDEN, FFN, HEADS = 4, 2048, 4096, 14336, 32
PLACE = {"device": "cuda", "dtype": torch.bfloat16}
PARTS = {
    "bf16": (torch.nn.RMSNorm, torch.nn.Linear),
    "parts": (fp4engine.RMSNorm, fp4engine.Linear),
}
"""The norm and the linear layer of each composition."""


class NormLinear(torch.nn.Module):
    def __init__(self, norm: Callable, linear: Callable, hidden: int, out_features: int) -> None:
        super().__init__()
        self.norm = norm(hidden, eps=1e-5, **PLACE)
        self.linear = linear(hidden, out_features, bias=False, **PLACE)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class FeedForward(torch.nn.Module):
    def __init__(self, norm: Callable, linear: Callable, hidden: int, ffn: int) -> None:
        super().__init__()
        self.norm = norm(hidden, eps=1e-5, **PLACE)
        self.fc1 = linear(hidden, 2 * ffn, bias=False, **PLACE)
        self.fc2 = linear(ffn, hidden, bias=False, **PLACE)

    def forward(self, x: Tensor) -> Tensor:
        activated, gate = self.fc1(self.norm(x)).chunk(2, dim=-1)
        return self.fc2(F.silu(activated) * gate)


class Block(torch.nn.Module):
    """Causal attention and feed-forward, each behind a norm and a residual connection, as TransformerLayer."""

    def __init__(self, norm: Callable, linear: Callable, hidden: int, ffn: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = NormLinear(norm, linear, hidden, 3 * hidden)
        self.proj = linear(hidden, hidden, bias=False, **PLACE)
        self.mlp = FeedForward(norm, linear, hidden, ffn)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in self.qkv(x).unflatten(-1, (self.heads, 3, -1)).unbind(-2))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def layer_norm_linear(hidden: int, out_features: int) -> torch.nn.Module:
    return fp4engine.LayerNormLinear(
        hidden, out_features, normalization="RMSNorm", bias=False, device="cuda", params_dtype=torch.bfloat16
    )


def layer_norm_mlp(hidden: int, ffn: int) -> torch.nn.Module:
    return fp4engine.LayerNormMLP(
        hidden, ffn, normalization="RMSNorm", activation="swiglu", bias=False, device="cuda",
        params_dtype=torch.bfloat16,
    )  # fmt: skip


def transformer_layer(hidden: int, ffn: int, heads: int) -> torch.nn.Module:
    return fp4engine.TransformerLayer(
        hidden, ffn, heads, hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd",
        fuse_qkv_params=True, normalization="RMSNorm", activation="swiglu", bias=False, device="cuda",
        params_dtype=torch.bfloat16,
    )  # fmt: skip


KINDS = {
    "LayerNormLinear": (NormLinear, layer_norm_linear),
    "LayerNormMLP": (FeedForward, layer_norm_mlp),
    "TransformerLayer": (Block, transformer_layer),
}
PROBLEMS = (
    ("LayerNormLinear", (HIDDEN, HIDDEN + 2 * HIDDEN // 4)),
    ("LayerNormLinear", (HIDDEN, 2 * FFN)),
    ("LayerNormMLP", (HIDDEN, FFN)),
    ("TransformerLayer", (HIDDEN, FFN, HEADS)),
)
SMALL = {"LayerNormLinear": (512, 768), "LayerNormMLP": (512, 768), "TransformerLayer": (512, 768, 8)}


def make(kind: str, sizes: tuple[int, ...]) -> dict[str, torch.nn.Module]:
    """Every variant, with the same values in the same order of parameters."""
    composition, module = KINDS[kind]
    models = {name: composition(*parts, *sizes) for name, parts in PARTS.items()} | {"module": module(*sizes)}
    with torch.no_grad():
        for values in zip(*(model.parameters() for model in models.values()), strict=True):
            for value in values[1:]:
                value.copy_(values[0])
    return models


def run_step(model: torch.nn.Module, inp: Tensor, grad: Tensor, recipe=None) -> list[Tensor]:
    """Forward and backward; gradients are dropped, so that nothing accumulates."""
    with fp4engine.autocast(enabled=recipe is not None, recipe=recipe or RECIPE):
        output = model(inp)
    output.backward(grad)
    results = [output.detach(), inp.grad, *(parameter.grad for parameter in model.parameters())]
    inp.grad = None
    for parameter in model.parameters():
        parameter.grad = None
    return results


def problem(kind: str, sizes: tuple[int, ...], batch: int, sequence: int) -> tuple[Tensor, Tensor]:
    width = sizes[1] if kind == "LayerNormLinear" else sizes[0]
    inp = torch.randn(batch, sequence, sizes[0], **PLACE).requires_grad_()
    return inp, torch.randn(batch, sequence, width, **PLACE)


def check() -> None:
    """Every byte of the modules on kernels equals the parts on the reference quantizers.

    Attention by matrix products: the gradient of PyTorch's flash attention differs from run to run.
    """
    oracle = CustomRecipe(qfactory=partial(reference_quantizer, RECIPE))
    for kind, sizes in SMALL.items():
        models = make(kind, sizes)
        inp, grad = problem(kind, sizes, 2, 256)
        results = []
        for name, recipe in (("module", RECIPE), ("parts", oracle)):
            fp4engine.manual_seed(0)
            with sdpa_kernel(SDPBackend.MATH):
                results.append(run_step(models[name], inp, grad, recipe))
        if not all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True)):
            raise SystemExit(f"{kind} differs from its parts on the reference quantizers: no speed is printed")


def flops(model: torch.nn.Module) -> float:
    """Of one step's products with weights."""
    return 6.0 * BATCH * SEQUENCE * sum(p.numel() for p in model.parameters() if p.ndim == 2)


def measure(kind: str, sizes: tuple[int, ...]) -> dict[str, float]:
    """Milliseconds of each variant."""
    models = make(kind, sizes)
    inp, grad = problem(kind, sizes, BATCH, SEQUENCE)
    recipes = {"bf16": None, "parts": RECIPE, "module": RECIPE}
    variants = {name: partial(run_step, model, inp, grad, recipes[name]) for name, model in models.items()}
    return time_in_turn(variants, repeats_for(flops(models["bf16"])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the feed-forward block only")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    check()
    rows = []
    print(f"{'module':30} {'bf16 ms':>9} {'parts ms':>9} {'module ms':>9} {'ratio':>6} {'parts':>6}", flush=True)
    for kind, sizes in PROBLEMS[2:3] if arguments.quick else PROBLEMS:
        times = measure(kind, sizes)
        ratio, parts_ratio = times["module"] / times["bf16"], times["parts"] / times["bf16"]
        rows.append(dict(module=kind, sizes=sizes, ms=times, ratio=ratio, parts_ratio=parts_ratio))
        name = f"{kind} {'x'.join(map(str, sizes))}"
        print(
            f"{name:30} {times['bf16']:9.3f} {times['parts']:9.3f} {times['module']:9.3f} {ratio:6.3f} "
            f"{parts_ratio:6.3f}",
            flush=True,
        )
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "block.json").write_text(json.dumps(dict(environment=environment(), rows=rows), indent=1))


if __name__ == "__main__":
    main()
