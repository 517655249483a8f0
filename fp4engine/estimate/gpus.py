"""What GPUs can do at most, by their makers, and the shares of it that training reached where it was measured."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """One GPU.

    Attributes:
        name: as ``--gpu`` takes it.
        memory: bytes.
        bf16, fp8, fp4: dense peaks in FLOP/s; None without such tensor cores.
        bandwidth: memory bandwidth, bytes/s.
        source: where the numbers are from.
        measured: whether estimates were compared with runs on this GPU; a time for another is a prediction.
    """

    name: str
    memory: float
    bf16: float
    fp8: float | None
    fp4: float | None
    bandwidth: float
    source: str
    measured: bool = False


GPUS = {
    name: GPU(
        name, gigabytes * 2**30, bf16 * 1e12, fp8 and fp8 * 1e12, fp4 and fp4 * 1e12, bandwidth * 1e12, source,
        measured=name in ("H100", "H200"),
    )
    for name, gigabytes, bf16, fp8, fp4, bandwidth, source in (
        ("A100", 80, 312, None, None, 2.039, "NVIDIA A100 80GB SXM data sheet"),
        ("H100", 80, 989.5, 1979, None, 3.35, "NVIDIA H100 SXM data sheet"),
        ("H200", 141, 989.5, 1979, None, 4.8, "NVIDIA H200 SXM data sheet"),
        ("B100", 180, 1750, 3500, 7000, 8.0, "NVIDIA Blackwell architecture brief"),
        ("B200", 180, 2250, 4500, 9000, 8.0, "NVIDIA Blackwell architecture brief"),
        ("GB200", 186, 2500, 5000, 10000, 8.0, "NVIDIA GB200 NVL72 data sheet"),
        ("B300", 279, 2250, 4500, 14000, 8.0, "NVIDIA Blackwell Ultra data sheet"),
        ("GB300", 279, 2500, 5000, 15000, 8.0, "NVIDIA GB300 NVL72 data sheet"),
        ("RTX-3090", 24, 71, None, None, 0.936, "NVIDIA Ampere GA102 architecture paper, FP32 accumulation"),
        ("A10", 24, 125, None, None, 0.6, "NVIDIA A10 data sheet"),
        ("L4", 24, 121, 242.5, None, 0.3, "NVIDIA L4 data sheet, halved: it counts sparse products"),
        ("L40S", 48, 362, 733, None, 0.864, "NVIDIA L40S data sheet"),
        ("RTX-4090", 24, 165.2, 330.3, None, 1.008, "NVIDIA Ada GPU architecture paper, FP32 accumulation"),
        ("RTX-5090", 32, 209.5, 419, 1676, 1.792, "NVIDIA RTX Blackwell GPU architecture paper"),
    )
}  # fmt: skip
"""Every GPU that is known, by name. Memory is GiB of the usable size, which the makers call GB."""


@dataclass(frozen=True)
class Shares:
    """Which part of a GPU's peaks a step reaches; the same constants for every GPU and model.

    Attributes:
        products: of the tensor cores' peak, in linear layers.
        attention: of the BF16 peak, in causal attention, whose masked half is not counted.
        bandwidth: of the memory's, in everything else, each operator reading and writing all it names.
        nvfp4_cast, fp8_cast: seconds per element of a linear layer's input, weight and gradient, times bandwidth:
            bytes as if the memory were the limit.
    """

    products: float
    attention: float
    bandwidth: float
    nvfp4_cast: float
    fp8_cast: float


SHARES = Shares(products=0.707, attention=0.283, bandwidth=0.52, nvfp4_cast=17.3, fp8_cast=16.8)
"""Fitted by hand to the eager rows of benchmarks/results/training.json and to benchmarks/results/step.json and
fp8.json, as they were on 2026-11-21: one H200, torch 2.11.0, Triton 3.6.0."""


@dataclass(frozen=True)
class Host:
    """What the host takes for one eager linear layer, forward and backward, in microseconds: an H200's machine.

    Attributes:
        nvfp4, fp8: of recipes with and without four-bit operands.
    """

    nvfp4: float
    fp8: float


HOST = Host(nvfp4=290, fp8=447)
"""Of benchmarks/results/host.json: one H200, torch 2.11.0, Triton 3.6.0, 2026-11-23. `nn.Linear` took 114 there, and
148 on the machine of step.json on the same day: hosts differ that much."""

CUDA_RESERVE = 2**30
"""Bytes that an answer of "fits" leaves free for CUDA's own context and for fragmentation: an assumption."""
