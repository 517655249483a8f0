"""Memory, time and traffic of a training step, before anybody runs it.

Memory comes from one step on tensors that have shapes and no contents, so what autograd keeps is counted and not
guessed. Time comes from the same step: products at a share of the tensor cores' peak, everything else at a share of the
memory's bandwidth; the shares were fitted on one kind of GPU (:data:`~fp4engine.estimate.gpus.SHARES`).
"""

import copy
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from fp4engine.accounting import executed_gemms
from fp4engine.accounting.planned import linear_shape
from fp4engine.arguments import require_patterns
from fp4engine.checkpoint import checkpoint
from fp4engine.convert import convert
from fp4engine.estimate.decoder import LARGEST, MODELS, Architecture, Decoder, add_lora, from_config
from fp4engine.estimate.gpus import CUDA_RESERVE, GPU, GPUS, HOST, SHARES
from fp4engine.estimate.trace import AsOnCuda, Step, Watch, trace
from fp4engine.functional import make_linear_plan
from fp4engine.modules import Gemms, GroupedLinear, Linear
from fp4engine.names import covers
from fp4engine.recipe import Recipe, zoo
from fp4engine.recipe.base import require_recipe
from fp4engine.state import autocast

__all__ = ["GPU", "GPUS", "MODELS", "Architecture", "Estimate", "estimate", "from_config"]

STATES = {"adamw": 2, "adamw8bit": 2, "sgd": 0, "momentum": 1}
"""Optimizer -> moments that it keeps of each trained parameter, in the parameter's dtype."""

FITTED = ("nvfp4", "fp8_current")
"""Rows of the recipe book whose steps were measured, beside BF16's, and compared with estimates."""

EIGHT_BITS = 1 + 4 / 256
"""Bytes of a moment of ``adamw8bit``, whatever the parameter's dtype: 8 bits, and one FP32 number per 256."""


@dataclass(frozen=True)
class Estimate:
    """What one GPU holds and does in a step; bytes, seconds and FLOPs. ``print(estimate)`` shows all of it.

    Attributes:
        label: model, recipe and sizes, in one line.
        parameters: number of parameters of the whole model; ``trained`` of them get gradients.
        parameter_bytes, gradient_bytes, optimizer_bytes: on one GPU.
        saved_by_linears: what linear layers keep from forward to backward, beyond parameters.
        saved_by_rest: what everything else keeps.
        temporary: what is alive at the peak beyond all of the above.
        peak: the most that is allocated at once.
        tokens: in one step of one GPU.
        seconds: of one step, without communication.
        share_of_peak: FLOPs of the model, 6 per parameter of a linear layer and token and the causal attention, over
            what the BF16 tensor cores could do in ``seconds``.
        wire: bytes that one GPU sends in a step, by what they are.
        gpu: see :class:`GPU`.
        notes: what is not measured in this estimate, in whole sentences.
    """

    label: str
    parameters: int
    trained: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    saved_by_linears: int
    saved_by_rest: int
    temporary: int
    peak: int
    tokens: int
    seconds: float
    share_of_peak: float
    wire: dict[str, int]
    gpu: GPU
    notes: tuple[str, ...] = field(default=())

    @property
    def tokens_per_second(self) -> float:
        """Of one GPU."""
        return self.tokens / self.seconds

    @property
    def wire_bytes(self) -> int:
        """What one GPU sends in a step."""
        return sum(self.wire.values())

    @property
    def fits(self) -> bool:
        """Whether ``peak`` leaves :data:`CUDA_RESERVE` of the GPU's memory free."""
        return self.peak + CUDA_RESERVE <= self.gpu.memory

    @property
    def answer(self) -> str:
        """One line: whether it fits, with the two numbers."""
        verdict = "fits" if self.fits else "does not fit"
        return f"{self.label}: {verdict}, peak {_gib(self.peak)} of {_gib(self.gpu.memory)} on {self.gpu.name}"

    def __str__(self) -> str:
        rows = [
            ("parameters", f"{_gib(self.parameter_bytes)}  ({self.parameters:,}, {self.trained:,} of them trained)"),
            ("gradients", _gib(self.gradient_bytes)),
            ("optimizer", _gib(self.optimizer_bytes)),
            ("kept by linears", _gib(self.saved_by_linears)),
            ("kept by the rest", _gib(self.saved_by_rest)),
            ("temporary", _gib(self.temporary)),
            ("peak", _gib(self.peak)),
            ("step", f"{self.seconds * 1e3:,.1f} ms, {self.tokens:,} tokens"),
            ("speed", f"{self.tokens_per_second:,.0f} tokens/s, {self.share_of_peak:.0%} of the BF16 peak"),
            ("on the wire", f"{_gib(self.wire_bytes)} sent per step"),
            *((f"  {name}", _gib(size)) for name, size in self.wire.items() if size),
        ]
        table = "\n".join(f"  {name.ljust(20)}  {value}" for name, value in rows)
        return "\n".join([self.answer, table, *(f"  note: {note}" for note in self.notes)])


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.2f} MiB"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e8 else f"{number / 1e6:.2f}M"


@dataclass(frozen=True)
class _Request:
    """The arguments of :func:`estimate`, and what follows from them.

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
    fp4_all_gather: bool
    host_microseconds: float | None
    keep: tuple[str, ...]

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def stored(self) -> int:
        """Bytes of a parameter of which FSDP keeps a shard."""
        return 4 if self.parameters == "fp32" else 2


def estimate(
    model: Architecture | nn.Module,
    *,
    recipe: Recipe | None = None,
    gpu: str = "H200",
    batch: int = 1,
    sequence: int = 2048,
    parameters: str = "fp32",
    optimizer: str = "adamw",
    checkpointing: bool = False,
    fsdp: int = 1,
    tp: int = 1,
    lora_rank: int = 0,
    fp4_all_gather: bool = False,
    host_microseconds: float | None = None,
    loss: Callable[[nn.Module], Tensor] | None = None,
    keep_high_precision: tuple[str, ...] = ("lm_head",),
    name: str = "model",
) -> Estimate:
    """What one training step of ``model`` takes on one GPU.

    Args:
        model: sizes of a decoder; or a module of your own, on any device, ``meta`` included, which is copied.
        recipe: of the linear layers; None is BF16.
        gpu: one of :data:`GPUS`.
        batch, sequence: sequences, and tokens in each, of one GPU's step.
        parameters: ``"fp32"``, multiplied under ``torch.autocast``, or ``"bf16"``; of a module, what it has.
        optimizer: one of :data:`STATES`.
        checkpointing: each block keeps its input only and runs again in backward.
        fsdp: over how many GPUs parameters, gradients and optimizer state are sharded.
        tp: over how many GPUs heads, the MLP's inner width and the vocabulary are split.
        lora_rank: above 0, freeze the model and train adapters of this rank beside each linear layer of its blocks.
        fp4_all_gather: FSDP gathers weights as :func:`fp4engine.distributed.fp4_all_gather` has it.
        host_microseconds: what the host takes for one quantized linear layer, forward and backward; a step is no faster
            than all of them. None is :data:`~fp4engine.estimate.gpus.HOST`; 0 is for CUDA graphs, which need no host.
        loss: of a module of your own, ``loss(model) -> scalar``; it makes its inputs itself, of ``batch * sequence``
            tokens.
        keep_high_precision: patterns for :func:`fp4engine.convert`; ``"lm_head"`` may cover nothing.
        name: what the answer calls the model.

    Raises:
        ValueError: an argument outside its words, sizes that do not divide, or options that a module of your own
            cannot be built anew for; a pattern that covers nothing; a ``loss`` that asks for values of a tensor.
    """
    _require(batch, sequence, fsdp, tp, lora_rank, parameters, optimizer, gpu)
    given = host_microseconds
    if given is not None and not (isinstance(given, int | float) and 0 <= given < float("inf")):
        raise ValueError(f"host_microseconds must be a finite number of at least 0, got {host_microseconds!r}")
    step: dict[str, Any] = {
        "recipe": recipe, "gpu": GPUS[gpu], "batch": batch, "sequence": sequence, "parameters": parameters,
        "optimizer": optimizer, "checkpointing": checkpointing, "fsdp": fsdp, "tp": tp, "lora_rank": lora_rank,
        "fp4_all_gather": fp4_all_gather, "host_microseconds": host_microseconds,
    }  # fmt: skip
    if fp4_all_gather and (fsdp == 1 or tp > 1 or recipe is None):
        raise ValueError(
            "fp4_all_gather=True needs fsdp of at least 2, tp=1 (weights that tensor parallelism splits are gathered "
            f"in high precision) and a recipe, got fsdp={fsdp}, tp={tp} and recipe={recipe!r}"
        )
    if not isinstance(model, Architecture | nn.Module):
        known = f", such as MODELS[{model!r}]" if isinstance(model, str) and model in MODELS else ""
        raise ValueError(f"model must be an Architecture{known}, or a torch.nn.Module, got {model!r:.80}")
    require_recipe(recipe)
    keep = require_patterns("keep_high_precision", keep_high_precision)
    if isinstance(model, nn.Module):
        if loss is None or checkpointing or tp != 1 or lora_rank or fsdp != 1:
            raise ValueError(
                "a module of your own is estimated as it is: it needs loss=..., and checkpointing, fsdp, tp and "
                "lora_rank are for an Architecture"
            )
        request = _Request(None, lambda: _without_memory(model), loss, keep=keep, **step)
        whole = sum(parameter.numel() for parameter in model.parameters())
    elif loss is not None:
        raise ValueError("loss goes with a module of your own; an Architecture has its own loss")
    else:
        request = _of_sizes(model.split(tp) if tp > 1 else model, keep, step)
        with torch.device("meta"):
            whole = sum(parameter.numel() for parameter in Decoder(model, lambda block: block).parameters())
    try:
        traced = _trace(request)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"loss(model) asks for values of a tensor, by {error.func}, and an estimate's tensors have none: give the "
            "module an input that routes nothing by values, such as counts in a list"
        ) from error
    return _assemble(request, name, whole, *traced)


def _require(
    batch: int, sequence: int, fsdp: int, tp: int, lora_rank: int, parameters: str, optimizer: str, gpu: str
) -> None:
    sizes = {
        "batch": (batch, 1),
        "sequence": (sequence, 1),
        "fsdp": (fsdp, 1),
        "tp": (tp, 1),
        "lora_rank": (lora_rank, 0),
    }
    for name, (value, least) in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        if value > LARGEST:
            raise ValueError(f"{name} must be at most {LARGEST:,}, got {value!r:.30}")
    words = {"parameters": (parameters, ("fp32", "bf16")), "optimizer": (optimizer, STATES), "gpu": (gpu, GPUS)}
    for name, (value, allowed) in words.items():
        if value not in tuple(allowed):
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Generator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _without_memory(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose parameters and buffers are fake tensors; those that were shared are shared."""
    fakes: dict[int, Any] = {}
    for parameter in model.parameters():
        fake = torch.empty(parameter.shape, dtype=parameter.dtype)
        fakes[id(parameter)] = nn.Parameter(fake, parameter.requires_grad)
    for buffer in model.buffers():
        fakes[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return copy.deepcopy(model, fakes)  # what a memo knows is not copied


def _of_sizes(sizes: Architecture, keep: tuple[str, ...], step: dict[str, Any]) -> _Request:
    rank, tokens = step["lora_rank"], step["batch"] * step["sequence"]
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
    return _Request(sizes, build, loss, keep=(*keep, *adapters), **step)


def _trace(request: _Request) -> tuple[nn.Module, Step, dict[str, Any]]:
    """The model on fake tensors, its step, and what its linear layers did."""
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        model = request.build()
        watch = stack.enter_context(Watch())
        stack.enter_context(AsOnCuda())
        for tensor in (*model.parameters(), *model.buffers()):
            watch.hold(tensor)
        if request.recipe is not None:
            keep = [pattern for pattern in request.keep if pattern != "lm_head" or _covers_some(model, pattern)]
            convert(model, keep_high_precision=keep)

        def loss(model: nn.Module) -> Tensor:
            with (
                torch.autocast("cpu", torch.bfloat16),
                autocast(enabled=request.recipe is not None, recipe=request.recipe),
            ):
                return request.loss(model)

        linears = _saved_by_linears(model, lambda: loss(model), watch)
        shards: list[Tensor] = []
        for parameter in model.parameters():
            parameter.grad = None
            if request.fsdp > 1 and parameter.requires_grad:  # only this rank's shard of a gradient stays
                parameter.register_post_accumulate_grad_hook(partial(_shard_gradient, request, shards))
        step = trace(model, loss, watch)
    return model, step, linears


def _covers_some(model: nn.Module, pattern: str) -> bool:
    return any(covers(pattern, name) for name, module in model.named_modules() if isinstance(module, nn.Linear))


def _shard_gradient(request: _Request, shards: list[Tensor], parameter: Tensor) -> None:
    parameter.grad = None
    size = -(-parameter.numel() // request.fsdp)
    shards.append(torch.empty(size, dtype=torch.float32 if request.stored == 4 else torch.bfloat16))


def _saved_by_linears(model: nn.Module, forward: Callable[[], Tensor], watch: Watch) -> dict[str, Any]:
    """What linear layers hand to autograd in one forward pass, each memory once: ``bytes``; and what they multiplied.

    Parameters themselves are not counted; the BF16 copies that ``torch.autocast`` makes of them are.
    """
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, int] = {}
    inside = [0]

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if inside[0] and storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    def enter(*_: Any) -> None:
        inside[0] += 1

    def leave(*_: Any) -> None:
        inside[0] -= 1

    def counted(multiply: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any, **kwargs: Any) -> Tensor:
            enter()
            output = multiply(*args, **kwargs)
            leave()
            return output

        return run

    handles: list[Any] = []
    for module in model.modules():
        if isinstance(module, Gemms):  # which other modules own and do not call
            vars(module)["multiply"] = counted(module.multiply)
        elif isinstance(module, nn.Linear | GroupedLinear):
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = forward()
    for handle in handles:
        handle.remove()
    for module in model.modules():
        vars(module).pop("multiply", None)
    saved = sum(kept.values())
    torch.autograd.backward(value)
    return {"bytes": saved, "flops": _counts(model)}


def _counts(model: nn.Module) -> dict[tuple[str, str, str], int]:
    """``(module, gemm, formats) -> FLOPs`` so far."""
    return {
        (module.name, *key): flops for module in executed_gemms(model).modules for key, flops in module.flops.items()
    }


def _label(request: _Request, name: str, whole: int, model: nn.Module) -> str:
    stored = "bf16" if request.parameters == "bf16" or request.lora_rank else "fp32"
    if request.sizes is None:
        stored = " and ".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}))
    words = [
        f"{name}, {_count(whole)} parameters in {stored or 'no dtype'}",
        f"{request.batch} x {request.sequence} tokens",
        f"LoRA of rank {request.lora_rank}" if request.lora_rank else "",
        request.optimizer,
        "checkpointing" if request.checkpointing else "",
        f"FSDP {request.fsdp}{' of FP4 codes' * request.fp4_all_gather}" if request.fsdp > 1 else "",
        f"TP {request.tp}" if request.tp > 1 else "",
    ]
    return ", ".join(filter(None, words))


def _assemble(
    request: _Request, name: str, whole: int, model: nn.Module, step: Step, linears: dict[str, Any]
) -> Estimate:
    gpu, fsdp = request.gpu, request.fsdp
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    numel = sum(parameter.numel() for parameter in trained)
    total = sum(parameter.numel() for parameter in model.parameters())
    if fsdp == 1:
        held = sum(parameter.nbytes for parameter in model.parameters())
        gradients = sum(parameter.nbytes for parameter in trained)
        states = round(sum(parameter.numel() * _state_bytes(request, parameter.itemsize) for parameter in trained))
        peak = max(step.peak, held + gradients) + states
    else:
        held, gradients = round(total * request.stored / fsdp), round(numel * request.stored / fsdp)
        states = round(numel * _state_bytes(request, request.stored) / fsdp)
        # gathered BF16 weights of two units, and gradients of one
        peak = max(held + step.peak - step.held + 3 * _largest_unit(model), held + gradients) + states
    rest = max(step.saved - linears["bytes"], 0)
    temporary = max(peak - held - states - linears["bytes"] - rest, 0)
    # a fused step reads parameters, gradients and moments, and writes parameters and moments
    optimizer_bytes = 2 * held * numel / max(total, 1) + gradients + 2 * states
    seconds, useful = _time(model, step, linears["flops"], gpu, optimizer_bytes)
    seconds = max(seconds, _host_seconds(request, linears["flops"]))
    return Estimate(
        _label(request, name, whole, model), whole, numel, held, gradients, states, linears["bytes"], rest, temporary,
        peak, request.tokens, seconds, useful / (seconds * gpu.bf16), _wire(request, model, numel), gpu,
        tuple(_notes(request)),
    )  # fmt: skip


def _state_bytes(request: _Request, itemsize: int) -> float:
    """Bytes of the optimizer's state for one trained parameter that is stored in ``itemsize`` bytes."""
    return STATES[request.optimizer] * (EIGHT_BITS if request.optimizer == "adamw8bit" else itemsize)


def _host_seconds(request: _Request, flops: dict[tuple[str, str, str], int]) -> float:
    """What the host takes to start the quantized linear layers of a step, which a GPU that is faster waits for."""
    layers = {name: formats for (name, _, formats) in flops if formats != "high_precision"}
    given = request.host_microseconds
    each = (HOST.nvfp4 if "e2m1" in formats else HOST.fp8 for formats in layers.values())
    return (sum(each) if given is None else len(layers) * given) * 1e-6


def _largest_unit(model: nn.Module) -> int:
    """Bytes in BF16 of the most parameters that FSDP gathers at once: a block's, the embedding's or the head's."""
    blocks = [block for module in model.modules() if isinstance(module, nn.ModuleList) for block in module]
    units = [*blocks, *(module for module in model.children() if not isinstance(module, nn.ModuleList))]
    return max(2 * sum(parameter.numel() for parameter in unit.parameters()) for unit in units)


def _time(
    model: nn.Module, step: Step, flops: dict[tuple[str, str, str], int], gpu: GPU, optimizer_bytes: float
) -> tuple[float, float]:
    """Seconds of a step, and the FLOPs of the model in it."""
    traffic = step.traffic
    quantized = {key: value for key, value in flops.items() if key[2] != "high_precision"}
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
    useful = traffic.product_flops + traffic.attention_flops / 2 + sum(quantized.values())
    return seconds, useful


def _peak(gpu: GPU, formats: str) -> float:
    """FLOP/s of the tensor cores that multiply operands of ``formats``, such as ``"e2m1 x e2m1"``."""
    if formats == "e2m1 x e2m1":
        return gpu.fp4 or gpu.bf16
    eight_bits = all(part in ("e4m3", "e5m2") for part in formats.split(" x "))
    return (gpu.fp8 if eight_bits else None) or gpu.bf16


def _wire(request: _Request, model: nn.Module, trained: int) -> dict[str, int]:
    """Bytes that one GPU sends: FSDP gathers weights twice and scatters FP32 gradients; TP reduces BF16."""
    fsdp, tp = request.fsdp, request.tp
    gathered = 2 * sum(parameter.numel() for parameter in model.parameters())
    if request.fp4_all_gather:
        from fp4engine.distributed.all_gather import bytes_as_codes

        assert request.recipe is not None
        for module in model.modules():
            if isinstance(module, Linear):
                shape = tuple(module.weight.shape)
                plan = make_linear_plan(request.recipe, module.module_type, module.name, shape)
                sent, _ = bytes_as_codes(plan, shape, fsdp)
                gathered += 0 if sent is None else sent - 2 * module.weight.numel()
    activations = 0.0
    if request.sizes is not None:  # four all-reduces of [tokens, width] per block
        activations = 4 * request.sizes.layers * 2 * (tp - 1) / tp * request.tokens * request.sizes.width * 2
    return {
        "weights": round((fsdp - 1) / fsdp * 2 * gathered),
        "gradients": round((fsdp - 1) / fsdp * 4 * trained),
        "activations": round(activations),
    }


def _notes(request: _Request) -> list[str]:
    gpu = request.gpu
    notes: list[str] = []
    if not gpu.measured:
        notes.append(
            f"the time is a prediction: shares of peak were measured on an H200, the peaks of {gpu.name} are from "
            f"{gpu.source}"
        )
    if request.recipe is not None and request.recipe not in map(zoo.make, (*FITTED, "high_precision")):
        notes.append(
            f"the time is that of casts and products as in {' and '.join(FITTED)}, to whose runs it was fitted; no run "
            "by this recipe was compared, and many recipes take longer (docs/limits.md)"
        )
    if gpu.fp4 and request.recipe is not None:
        notes.append("products on FP4 tensor cores have not been run by this project")
    unmeasured = {"LoRA": request.lora_rank > 0, "tensor parallelism": request.tp > 1}
    if any(unmeasured.values()):
        names = " and ".join(name for name, used in unmeasured.items() if used)
        notes.append(f"memory with {names} is computed and not compared with a run")
    if request.fsdp > 1 or request.tp > 1:
        notes.append("the time has no communication, and the wire no outer amaxes, which are a few bytes a layer")
    if request.fp4_all_gather:
        notes.append("the peak is that of weights gathered in BF16; weights gathered as codes take less")
    return notes
