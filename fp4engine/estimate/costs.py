"""Seconds of a step, and bytes that it sends, from what the step did."""

import math

from torch import nn

from fp4engine.accounting.planned import FP4_FORMATS, linear_shape
from fp4engine.estimate.gpus import GPU, HOST, SHARES
from fp4engine.estimate.request import Request
from fp4engine.estimate.trace import Flops, Linears, Step
from fp4engine.formats import FORMATS
from fp4engine.modules import Gemms, Linear


def seconds_of(model: nn.Module, step: Step, linears: Linears, gpu: GPU, optimizer_bytes: float) -> tuple[float, int]:
    """Seconds of a step, and the FLOPs of the model in it, without what a checkpoint runs again."""
    traffic = step.traffic
    quantized, fprop = (
        {key: value for key, value in flops.items() if key[2] != "high_precision"}
        for flops in (linears.flops, linears.fprop)
    )
    bandwidth = gpu.bandwidth * SHARES.bandwidth
    seconds = traffic.product_flops / (gpu.bf16 * SHARES.products)
    seconds += traffic.attention_flops / 2 / (gpu.bf16 * SHARES.attention)
    seconds += (traffic.bytes_moved + optimizer_bytes) / bandwidth
    shapes = dict(model.named_modules())
    for (name, gemm, formats), value in quantized.items():
        module = shapes[name]
        assert isinstance(module, nn.Linear | Gemms)
        out_features, in_features = linear_shape(module)
        rows = value // (2 * in_features * out_features)
        seconds += value / (_peak(gpu, formats) * SHARES.products)
        if gemm == "fprop":
            elements = rows * in_features + in_features * out_features
        else:
            elements = rows * out_features // 2  # the gradient, shared by dgrad and wgrad
        seconds += elements * (SHARES.nvfp4_cast if "e2m1" in formats else SHARES.fp8_cast) / gpu.bandwidth
    backward = sum(value for (_, gemm, _), value in quantized.items() if gemm != "fprop")
    return seconds, traffic.model_flops + sum(fprop.values()) + backward


def _peak(gpu: GPU, formats: str) -> float:
    """FLOP/s of the tensor cores that multiply operands of ``formats``, such as ``"e2m1 x e2m1"``."""
    if formats in FP4_FORMATS:  # FP4 tensor cores multiply one pair of terms at a time, others all at once
        products = math.prod(FORMATS[part].terms for part in formats.split(" x "))
        return gpu.fp4 / products if gpu.fp4 else gpu.bf16
    eight_bits = all(part in ("e4m3", "e5m2") for part in formats.split(" x "))
    return (gpu.fp8 if eight_bits else None) or gpu.bf16


def host_seconds(request: Request, flops: Flops) -> float:
    """What the host takes to start the quantized linear layers of a step, which a GPU that is faster waits for."""
    layers = {name: formats for (name, _, formats) in flops if formats != "high_precision"}
    given = request.host_microseconds
    each = (HOST.nvfp4 if "e2m1" in formats else HOST.fp8 for formats in layers.values())
    return (sum(each) if given is None else len(layers) * given) * 1e-6


def wire(request: Request, model: nn.Module, trained: int) -> dict[str, int]:
    """Bytes that one GPU sends: FSDP gathers weights twice and scatters FP32 gradients; TP reduces BF16."""
    fsdp, tp = request.fsdp, request.tp
    gathered = 2 * sum(parameter.numel() for parameter in model.parameters())
    if request.fp4_all_gather:
        from fp4engine.distributed.all_gather import bytes_as_codes

        assert request.recipe is not None
        for module in model.modules():
            if isinstance(module, Linear):
                shape = module.weight_shape()
                plan = module.plan_by(request.recipe)
                sent, _ = bytes_as_codes(plan, shape, fsdp)
                gathered += 0 if sent is None else sent - 2 * math.prod(shape)
    activations = 0.0
    if request.sizes is not None:  # four all-reduces of [tokens, width] per block
        activations = 4 * request.sizes.layers * 2 * (tp - 1) / tp * request.tokens * request.sizes.width * 2
    return {
        "weights": round((fsdp - 1) / fsdp * 2 * gathered),
        "gradients": round((fsdp - 1) / fsdp * 4 * trained),
        "activations": round(activations),
    }


def largest_unit(model: nn.Module) -> int:
    """Bytes in BF16 of the most parameters that FSDP gathers at once: a block's, the embedding's or the head's."""
    blocks = [block for module in model.modules() if isinstance(module, nn.ModuleList) for block in module]
    units = [*blocks, *(module for module in model.children() if not isinstance(module, nn.ModuleList))]
    return max(2 * sum(parameter.numel() for parameter in unit.parameters()) for unit in units)
