"""What an estimate is asked: sizes or a module, and everything that decides what a step of it takes."""

import copy
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fp4engine.checkpoint import checkpoint
from fp4engine.estimate.decoder import Architecture, Decoder, add_lora
from fp4engine.estimate.gpus import GPU
from fp4engine.estimate.trace import AsOnCuda
from fp4engine.positions import require_positions
from fp4engine.recipe import Recipe

STATES = {"adamw": 2, "adamw8bit": 2, "sgd": 0, "momentum": 1}
"""Optimizer -> moments that it keeps of each trained parameter, in the parameter's dtype."""

EIGHT_BITS = 1 + 4 / 256
"""Bytes of a moment of ``adamw8bit``, whatever the parameter's dtype: 8 bits, and one FP32 number per 256."""


@dataclass(frozen=True)
class Request:
    """The arguments of :func:`fp4engine.estimate.estimate`, and what follows from them.

    Attributes:
        sizes: of one rank; None for a module of the caller's.
        build: makes the model, on fake tensors.
        loss: its scalar loss.
    """

    sizes: Architecture | None
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]
    recipe: Recipe | None
    gpu: GPU
    batch: int
    sequence: int
    parameters: str
    optimizer: str
    checkpointing: bool
    fsdp: int
    tp: int
    lora_rank: int
    quantized_base: bool
    fp4_all_gather: bool
    host_microseconds: float | None
    keep: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Tokens that one GPU reads in a step."""
        return self.batch * self.sequence

    @property
    def stored(self) -> int:
        """Bytes of one element of a stored parameter: 4 in FP32, 2 in BF16."""
        return 4 if self.parameters == "fp32" else 2

    def state_bytes(self, itemsize: int) -> float:
        """Bytes of the optimizer's state for one trained parameter that is stored in ``itemsize`` bytes."""
        return STATES[self.optimizer] * (EIGHT_BITS if self.optimizer == "adamw8bit" else itemsize)


def without_memory(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose tensors are fake; those that were shared are shared.

    Raises:
        ValueError: a parameter is no plain tensor, such as a weight that is stored as codes, or a DTensor; an embedding
            has sparse gradients; the model holds what cannot be copied, such as a lock.
    """
    fakes: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:
            kind = type(parameter).__name__
            raise ValueError(f"{name!r} is a {kind}, whose memory an estimate does not know; give the model as it was")
        fake = torch.empty(parameter.shape, dtype=parameter.dtype)
        fakes[id(parameter)] = nn.Parameter(fake, parameter.requires_grad)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(f"{name!r} has sparse gradients, whose memory an estimate does not know; set sparse=False")
        held = {key: value for key, value in vars(module).items() if key not in ("_parameters", "_modules")}
        for tensor in tree_leaves(held):  # of buffers, and of attributes that no module registers
            if isinstance(tensor, Tensor) and id(tensor) not in fakes:
                fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                fakes[id(tensor)] = fake.requires_grad_(tensor.requires_grad)
    try:
        return copy.deepcopy(model, fakes)  # what a memo knows is not copied
    except (TypeError, RuntimeError) as error:  # such as of a lock, or of a tensor inside an object
        raise ValueError(f"model must be one that can be copied, and {type(model).__name__} is not: {error}") from error


def of_sizes(sizes: Architecture, keep: tuple[str, ...], step: dict[str, Any]) -> Request:
    """The request for one rank's part of a decoder, of ``sizes``; ``keep`` and ``step`` are its other fields."""
    rank, tokens = step["lora_rank"], step["batch"] * step["sequence"]
    require_positions("sequence", step["sequence"], sizes.positions or math.inf)
    if tokens * max(sizes.width, sizes.ffn, sizes.vocabulary) > 1 << 56:  # PyTorch counts bytes by 64 bits
        raise ValueError(f"batch={step['batch']} times sequence={step['sequence']} is too much for {sizes}")
    dtype = torch.bfloat16 if step["parameters"] == "bf16" or step["fsdp"] > 1 else torch.float32

    def wrap(block: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(x: Tensor) -> Tensor:
            with AsOnCuda():  # a recomputation runs outside the region around the step
                return block(x)

        return partial(checkpoint, run, use_reentrant=False) if step["checkpointing"] else block

    def build() -> nn.Module:
        with _default_dtype(torch.bfloat16 if rank else dtype):
            model = Decoder(sizes, wrap)
        if rank:
            add_lora(model, rank, dtype)
        return model

    def loss(model: nn.Module) -> Tensor:
        assert isinstance(model, Decoder)
        return model.loss(torch.zeros((step["batch"], step["sequence"] + 1), dtype=torch.int64))

    adapters = ("**.lora_a", "**.lora_b") if rank else ()
    return Request(sizes, build, loss, keep=(*keep, *adapters), **step)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Generator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
