"""Norm, feed-forward block and a whole layer of Llama-3-8B, forward and backward, beside BF16 in the same run.

    python benchmarks/block.py [--quick] [--out benchmarks/results]

8,192 tokens, hidden size 4,096, RMSNorm, SwiGLU to 14,336, no biases, BF16 parameters and activations. Rows:

    bf16     plain PyTorch modules one after the other: the denominator of every ratio
    parts    the same composition of fp4engine.RMSNorm and fp4engine.Linear, default recipe
    module   LayerNormLinear, LayerNormMLP or TransformerLayer, default recipe

The modules' bytes are held to an oracle before anything is timed. Then what the modules fuse, on its own: a function
and the cast of its value, one after the other and fused.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from timing import argument_parser, environment, graph_seconds, repeats_for, time_in_turn, write_json
from torch import Tensor

import fp4engine
from fp4engine.functional.activation import Activation
from fp4engine.functional.norm import Norm
from fp4engine.kernels.amax import add_amax
from fp4engine.kernels.cast import Side
from fp4engine.kernels.launch import LaunchBuilder, meta_of
from fp4engine.kernels.load import Prologue, Reading
from fp4engine.quantizers import make_quantizer, reference_quantizer
from fp4engine.recipe import CustomRecipe, NVFP4BlockScaling
from fp4engine.reference.norm import normalize, row_statistics
from fp4engine.roles import QuantizerRole

RECIPE = NVFP4BlockScaling()
BATCH, SEQUENCE, HIDDEN, FFN, HEADS = 4, 2048, 4096, 14336, 32
TOKENS = BATCH * SEQUENCE
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
        return self.fc2(swiglu(self.fc1(self.norm(x))))


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
QUANTIZER = make_quantizer(RECIPE, QuantizerRole("linear", "input"))


def make(kind: str, sizes: tuple[int, ...]) -> dict[str, torch.nn.Module]:
    """Every variant, with the same values in the same order of parameters."""
    composition, module = KINDS[kind]
    models = {name: composition(*parts, *sizes) for name, parts in PARTS.items()} | {"module": module(*sizes)}
    with torch.no_grad():
        for values in zip(*(model.parameters() for model in models.values()), strict=True):
            for value in values[1:]:
                value.copy_(values[0])
    return models


def run_step(model: torch.nn.Module, inp: Tensor, grad: Tensor, enabled: bool) -> None:
    """Forward and backward; gradients are dropped, so that nothing accumulates."""
    with fp4engine.autocast(enabled=enabled, recipe=RECIPE):
        output = model(inp)
    output.backward(grad)
    inp.grad = None
    for parameter in model.parameters():
        parameter.grad = None


def problem(kind: str, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    width = sizes[1] if kind == "LayerNormLinear" else sizes[0]
    inp = torch.randn(BATCH, SEQUENCE, sizes[0], **PLACE).requires_grad_()
    return inp, torch.randn(BATCH, SEQUENCE, width, **PLACE)


def oracle_norm(module: torch.nn.Module, x: Tensor) -> Tensor:
    rows = x.flatten(0, -2)
    return normalize(rows, row_statistics(rows, module.norm.eps, False), module.layer_norm_weight, None, x.dtype)


def activated(activation: Activation, x: Tensor) -> Tensor:
    """The value that a fused cast of the activation encodes: the amax kernel writes it for the cast behind it."""
    source, _ = activation.source(x, x.dtype)
    builder = LaunchBuilder(x.device, 1)
    reading = Reading(meta_of(x), Prologue.of(source.kind, x.dtype, source.gated))
    y = builder.output(reading.shape, x.dtype)
    add_amax(builder, reading, Side.of(QUANTIZER.rowwise_spec, "codes", 0), None, (None, None), y)
    return builder.launch()(x)[0]


def check() -> None:
    """Every output byte is that of reference quantizers behind the oracle's norm and the kernels' activation."""
    oracle = CustomRecipe(qfactory=partial(reference_quantizer, RECIPE))
    linear, mlp = layer_norm_linear(512, 768), layer_norm_mlp(512, 768)
    x = torch.randn(512, 512, **PLACE)
    with torch.no_grad():
        with fp4engine.autocast(recipe=RECIPE):
            ours = linear(x), mlp(x)
        with fp4engine.autocast(recipe=oracle):
            projected = linear.multiply(oracle_norm(linear, x), linear.weight, None)
            hidden = mlp.fc1.multiply(oracle_norm(mlp, x), mlp.fc1_weight, None)
            theirs = projected, mlp.fc2.multiply(activated(mlp.activation, hidden), mlp.fc2_weight, None)
    if not all(torch.equal(left, right) for left, right in zip(ours, theirs, strict=True)):
        raise SystemExit("bytes of a module differ from its oracle's: no speed is printed")


def measure_casts() -> dict[str, dict[str, float]]:
    """Milliseconds of what the modules fuse, on its own: a function and the cast of its value."""
    x = torch.randn(TOKENS, HIDDEN, **PLACE)
    gamma = torch.randn(HIDDEN, **PLACE)
    hidden = torch.randn(TOKENS, 2 * FFN, **PLACE)
    grad = torch.randn(TOKENS, FFN, **PLACE)
    leaf = hidden.clone().requires_grad_()
    composed = swiglu(leaf)
    norm, activation = Norm("RMSNorm", 1e-5), Activation("swiglu")

    backward = {
        "apart": lambda: torch.autograd.grad(composed, leaf, grad, retain_graph=True),
        "fused": lambda: activation.gradients(grad, hidden, (), None),
    }
    forward = {
        "RMSNorm and cast": {
            "apart": lambda _: QUANTIZER(F.rms_norm(x, (HIDDEN,), gamma, 1e-5)),
            "fused": lambda _: QUANTIZER(norm.source(x, x.dtype, gamma, None)[0]),
        },
        "SwiGLU and cast": {
            "apart": lambda _: QUANTIZER(swiglu(hidden)),
            "fused": lambda _: QUANTIZER(activation.source(hidden, hidden.dtype)[0]),
        },
    }
    times = {name: {k: graph_seconds(run, [x]) * 1e3 for k, run in pair.items()} for name, pair in forward.items()}
    return times | {"SwiGLU backward": time_in_turn(backward, 20)}


def swiglu(x: Tensor) -> Tensor:
    activated, gate = x.chunk(2, dim=-1)
    return F.silu(activated) * gate


def flops(model: torch.nn.Module) -> float:
    """The operations of one step's products with weights."""
    return 6.0 * TOKENS * sum(p.numel() for p in model.parameters() if p.ndim == 2)


def measure(kind: str, sizes: tuple[int, ...]) -> dict[str, float]:
    """Milliseconds of each variant."""
    models = make(kind, sizes)
    inp, grad = problem(kind, sizes)
    variants = {name: partial(run_step, model, inp, grad, name != "bf16") for name, model in models.items()}
    return time_in_turn(variants, repeats_for(flops(models["bf16"])))


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="the feed-forward block only")
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
    casts = measure_casts()
    print(f"\n{'function and cast, 8,192 tokens':32} {'apart ms':>9} {'fused ms':>9}")
    for name, times in casts.items():
        print(f"{name:32} {times['apart']:9.3f} {times['fused']:9.3f}")
    write_json(arguments.out / "block.json", dict(environment=environment(), rows=rows, casts=casts))


if __name__ == "__main__":
    main()
