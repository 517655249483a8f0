"""Whether a server computes what was trained: the trained recipe and the served checkpoint, on the same tokens.

Legend: B sequences, T tokens of each, V size of the vocabulary.
"""

import copy
import os
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp4engine.arguments import require_bools, require_model, require_path
from fp4engine.checkpoint_names import Piece
from fp4engine.export.calibration import evaluated, output_of
from fp4engine.export.reader import CheckpointError, ServedCheckpoint
from fp4engine.export.serving_format import FP8, NVFP4, STATIC, WEIGHT_ONLY, WeightForm
from fp4engine.export.slabs import progress_bar
from fp4engine.export.state import ModelState
from fp4engine.formats import Outer
from fp4engine.modules import QuantizedWeight
from fp4engine.modules.gemms import Gemms
from fp4engine.modules.weight_places import WeightPlace, weight_places
from fp4engine.ops import Operand
from fp4engine.quantizers import IdentityQuantizer, Quantizer, make_quantizer
from fp4engine.recipe import CustomRecipe, LinearRecipe, Recipe
from fp4engine.recipe.base import require_recipe
from fp4engine.reference.scaling import divide
from fp4engine.roles import QuantizerRole
from fp4engine.tensor import QuantizedTensor


@dataclass(frozen=True)
class OperandApart:
    """An operand whose codes or block scales are not those that trained.

    Attributes:
        layer: name of the module in the model.
        operand: ``"weight"`` or ``"input"``.
        row, block: the first block that differs: its row, and its number in the row.
        trained, served: the values that the block decodes to.
        share: blocks that differ, of all.
    """

    layer: str
    operand: str
    row: int
    block: int
    trained: tuple[float, ...]
    served: tuple[float, ...]
    share: float

    def __str__(self) -> str:
        first, second = (", ".join(f"{value:.4g}" for value in side[:4]) for side in (self.trained, self.served))
        return (
            f"{self.layer}, {self.operand}: {self.share:.2%} of its blocks have other codes or scales, the first in "
            f"row {self.row}, block {self.block}: {first}, ... in training and {second}, ... as served"
        )


@dataclass(frozen=True)
class Certificate:
    """How far a served checkpoint is from the recipe that trained it; ``print(certificate)`` shows it.

    Attributes:
        positions: tokens whose distribution over the vocabulary was compared.
        kl_mean, kl_max: Kullback-Leibler divergence of the served distribution from the trained one, in nats.
        log_probability: the largest difference of a log-probability, over all positions and the whole vocabulary.
        where: ``(batch, sequence, position, token)`` of that difference.
        same_choice: share of positions with the same most probable token.
        logits: ``|served - trained| / |trained|`` (Frobenius) of all logits.
        apart: the operands whose codes differ in the first batch, in the order in which they are multiplied.
        operands: how many operands were compared.
        dependence: ``"trained" or "served" -> what a score may depend on -> the largest difference of a
            log-probability``; empty for models that do not generate.
    """

    positions: int
    kl_mean: float
    kl_max: float
    log_probability: float
    where: tuple[int, int, int, int]
    same_choice: float
    logits: float
    apart: tuple[OperandApart, ...]
    operands: int
    dependence: dict[str, dict[str, float]]

    @property
    def is_exact(self) -> bool:
        """True if all log-probabilities are the same, bit for bit."""
        return self.log_probability == 0

    def __str__(self) -> str:
        batch, sequence, position, token = self.where
        lines = [
            f"{self.positions} positions: KL {self.kl_mean:.2e} nats in the mean, {self.kl_max:.2e} at most; the same "
            f"most probable token at {self.same_choice:.2%}; logits differ by {self.logits:.1e}",
            f"largest difference of a log-probability: {self.log_probability:.2e}, of token {token} at position "
            f"{position} of sequence {sequence} in batch {batch}",
        ]
        if self.apart:
            lines.append(
                f"{len(self.apart)} of {self.operands} operands have other codes; the first is {self.apart[0]}"
            )
        else:
            lines.append(f"all {self.operands} operands have the same codes")
        for side, found in self.dependence.items():
            said = ", ".join(f"{what} by {difference:.1e}" for what, difference in found.items())
            lines.append(f"a token's log-probabilities as {side} depend on {said}")
        return "\n".join(lines)


def compare_served(
    model: nn.Module,
    directory: str | os.PathLike[str],
    batches: Iterable[Any],
    recipe: Recipe | None = None,
    *,
    inputs: bool = True,
    progress: bool = True,
) -> Certificate:
    """Run ``model`` by the recipe that trained it, and the checkpoint as a server does, on the same tokens.

    The server is this package: the codes and outer scales in the files, and inputs cast as the configuration says,
    multiplied in the model's dtype. A GPU's kernels may add in another order. So what differs here is what the export
    and the scales of inputs make of the model, and nothing else.

    Args:
        model: converted, with the parameters that were exported; its output has ``logits`` [B, T, V], or is them.
        directory: what :func:`export_checkpoint` wrote, or a peer.
        batches: as in :func:`calibrate`. What a token's score depends on is tried with the last one.
        recipe: what the model was trained by; None takes the recipe that each module was converted with.
        inputs: False leaves inputs in high precision on both sides, which compares weights alone.
        progress: draw a bar of the batches.

    Raises:
        CheckpointError: the checkpoint is damaged, or is none of this model's.
        ValueError: no batch, or arguments of another type.
    """
    require_model(model)
    require_recipe(recipe)
    require_bools(inputs=inputs, progress=progress)
    if not isinstance(batches, Iterable) or isinstance(batches, Mapping | Tensor):
        raise ValueError(f"batches must be a sequence of batches, got {batches!r:.80}")
    served = served_model(model, ServedCheckpoint(require_path("directory", directory)), inputs)
    if not inputs:
        recipe = _without_inputs(model, recipe)
    sides = ((model, recipe), (served, None))
    compared, batch = _Figures(), None
    apart, operands = [], 0
    with evaluated(model), torch.no_grad():
        for batch in progress_bar(batches, "compare", "batch", progress):
            with ExitStack() as stack:
                heard = [] if compared.batches else [stack.enter_context(_operands(*side)) for side in sides]
                runs = [_logits(*side, batch) for side in sides]
            compared.add(*runs)
            if heard:
                apart, operands = list(_apart(*heard)), len(heard[0])
        if batch is None:
            raise ValueError("batches must hold at least one batch, got none")
        names = ("trained", "served")
        found = {name: _dependence(*side, batch) for name, side in zip(names, sides, strict=True)}
    dependence = {name: each for name, each in found.items() if each}
    return compared.certificate(tuple(apart), operands, dependence)


def served_model(model: nn.Module, checkpoint: ServedCheckpoint, inputs: bool = True) -> nn.Module:
    """A copy of a converted model that multiplies the codes of a checkpoint, and casts inputs as servers do.

    Inputs that are cast by blocks alone, which servers do by rules of their own, are cast as in training.

    Raises:
        CheckpointError: it lacks a tensor of the model, or has one of another shape.
    """
    twin = copy.deepcopy(model).eval()
    state = ModelState(twin, None)
    directory = checkpoint.tensors.directory
    placed = weight_places(twin)
    for name, place in placed.items():
        pieces = state.of(place.name)
        layers = [piece.module for piece in pieces]
        if not any(layer in checkpoint.layers for layer in layers):
            for gemms in place.gemms:
                gemms.recipe = LinearRecipe()
            continue
        if any(layer not in checkpoint.layers for layer in layers):
            raise CheckpointError(f"{directory}: only a part of {name!r} is in codes")
        _serve(place, checkpoint, pieces, inputs)
    tensors = {**dict(twin.named_parameters()), **dict(twin.named_buffers())}
    with torch.no_grad():
        for piece in state.pieces.values():
            if checkpoint.is_codes(piece.name):
                continue
            own = piece.of(tensors[piece.source])
            if piece.name not in checkpoint.tensors:
                raise CheckpointError(f"{directory}: {piece.name!r} is not in it")
            stored = checkpoint.tensors[piece.name]
            if stored.shape != own.shape:
                got = f"has shape {list(stored.shape)}, and in the model {list(own.shape)}"
                raise CheckpointError(f"{directory}: {piece.name!r} {got}")
            own.copy_(stored)
    return twin


def _serve(place: WeightPlace, checkpoint: ServedCheckpoint, pieces: list[Piece], inputs: bool) -> None:
    """Put the codes of ``pieces`` into a place of a model, and the casts that the configuration says."""
    form, how = checkpoint.layers[pieces[0].module]
    weight = place.weight
    assert weight is not None
    matrices: dict[int | None, list[Piece]] = {}
    for piece in pieces:
        matrices.setdefault(piece.expert, []).append(piece)
    quantizer = Quantizer(form.spec)
    made: list[QuantizedWeight] = []
    for parts in matrices.values():
        found = [checkpoint.operand(part.module) for part in parts]
        codes = torch.cat([code for code, _, _ in found])
        scales = torch.cat([scale for _, scale, _ in found if scale is not None]) if form.has_block_scales else None
        outers = [outer for _, _, outer in found if outer is not None]
        if any(not torch.equal(outer, outers[0]) for outer in outers):
            names = ", ".join(part.module for part in parts)
            raise CheckpointError(
                f"{checkpoint.tensors.directory}: {names} are one matrix and have several outer scales"
            )
        amax = torch.full((1,), form.spec.constant_amax, dtype=torch.float32)
        if outers:
            numerator = form.spec.numerator
            amax = divide(numerator, outers[0]) if checkpoint.form.divides(form) else outers[0] * numerator
        operand = form.operand(codes, scales)
        rows = operand[0].shape[0]
        shape = (form.cols(codes), rows) if place.transposed else (rows, form.cols(codes))
        tensors = [tensor.to(weight.device) for tensor in (*operand, amax)]
        made.append(QuantizedWeight(quantizer, shape, weight.dtype, tensors, place.transposed))
    stored = made[0] if weight.ndim == 2 else QuantizedWeight.stacked(made)
    if stored.shape != weight.shape:
        got = f"{place.name!r} has shape {list(stored.shape)}, and in the model {list(weight.shape)}"
        raise CheckpointError(f"{checkpoint.tensors.directory}: {got}")
    stored.is_frozen = True
    place.owner._parameters[place.parameter] = nn.Parameter(stored, requires_grad=False)
    amaxes = [amax for piece in pieces if (amax := checkpoint.input_amax(piece.module)) is not None]
    for gemms in place.gemms:
        gemms.recipe = CustomRecipe(
            qfactory=_ServedCasts(quantizer, _input_quantizer(gemms, form, how, amaxes, inputs))
        )


def _input_quantizer(gemms: Gemms, form: WeightForm, how: str, amaxes: list[float], inputs: bool) -> Quantizer:
    """What a server casts the inputs of a layer by."""
    if not inputs or how == WEIGHT_ONLY:
        return IdentityQuantizer()
    if how == STATIC:
        return _FixedAmax(form.spec, amax_of_all=max(amaxes))
    if form is NVFP4:
        return _FixedAmax(form.spec, amax_of_all=form.spec.numerator)
    if form is FP8:
        return Quantizer(form.spec.replace(outer=Outer.ROW))
    return make_quantizer(gemms.recipe, gemms.role("input", gemms.recipe)) if gemms.recipe else Quantizer(form.spec)


@dataclass(frozen=True)
class _ServedCasts:
    """``role -> quantizer`` of one module."""

    weight: Quantizer
    input: Quantizer

    def __call__(self, role: QuantizerRole) -> Quantizer:
        return {"weight": self.weight, "input": self.input}.get(role.tensor_type) or IdentityQuantizer()


@dataclass(frozen=True)
class _FixedAmax(Quantizer):
    """Casts every tensor by one outer amax, as servers do after calibration."""

    amax_of_all: float = 0.0

    def amax(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = True, **_: Any) -> Any:
        """The one amax, on the tensor's device."""
        fixed = torch.full((1,), self.amax_of_all, dtype=torch.float32, device=x.device)
        return fixed if rowwise else None, fixed if columnwise else None

    def quantize(self, x: Any, **arguments: Any) -> QuantizedTensor:
        """As :meth:`Quantizer.quantize`, with :attr:`amax_of_all` as the outer amax of every tensor."""
        fixed, _ = self.amax(x)
        return super().quantize(x, **arguments | {"rowwise_amax": fixed})


def _without_inputs(model: nn.Module, recipe: Recipe | None) -> Recipe:
    """``recipe``, or else the recipe of each module, with its casts of weights and with inputs in high precision."""
    own = {module.name: module.recipe for module in model.modules() if isinstance(module, Gemms)}

    def quantizer(role: QuantizerRole) -> Quantizer:
        followed = recipe or own.get(role.name)
        if role.tensor_type != "weight" or followed is None:
            return IdentityQuantizer()
        full = make_quantizer(followed, role)
        return Quantizer(full.rowwise_spec, backend=full.backend) if full.only_casts else full

    return CustomRecipe(qfactory=quantizer)


def _logits(model: nn.Module, recipe: Recipe | None, batch: Any, **more: Any) -> Tensor:
    """Logits [B, T, V] in FP32."""
    output = output_of(model, recipe, batch, **more)
    logits = output.logits if hasattr(output, "logits") else output
    if not isinstance(logits, Tensor) or logits.ndim < 2:
        raise ValueError(f"a model's output must have logits [..., V], or be them, got {type(logits).__name__}")
    return logits.float().reshape(logits.shape[0], -1, logits.shape[-1])


class _Figures:
    """What :class:`Certificate` says of logits, batch by batch."""

    def __init__(self) -> None:
        self.batches = self.positions = self.same = 0
        self.kl = self.kl_max = self.wrong = self.all = self.largest = 0.0
        self.where = (0, 0, 0, 0)

    def add(self, trained: Tensor, served: Tensor) -> None:
        """Compare the logits [B, T, V] of one more batch."""
        if trained.shape != served.shape:
            raise ValueError(f"logits have shapes {list(trained.shape)} in training and {list(served.shape)} as served")
        wanted, got = (side.double().log_softmax(-1) for side in (trained, served))
        # max and > pass over a NaN, so it is an infinite difference; -inf on both sides is none.
        difference = torch.where(wanted == got, 0.0, wanted - got)
        divergence = (wanted.exp() * difference).sum(-1).clamp(min=0).nan_to_num(nan=torch.inf, posinf=torch.inf)
        apart = difference.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        if float(apart.max()) > self.largest:
            self.largest = float(apart.max())
            index = torch.unravel_index(apart.argmax(), apart.shape)
            sequence, position, token = (int(each) for each in index)
            self.where = (self.batches, sequence, position, token)
        self.kl += float(divergence.sum())
        self.kl_max = max(self.kl_max, float(divergence.max()))
        self.same += int((wanted.argmax(-1) == got.argmax(-1)).sum())
        self.wrong += float((served - trained).double().square().sum())
        self.all += float(trained.double().square().sum())
        self.positions += divergence.numel()
        self.batches += 1

    def certificate(
        self, apart: tuple[OperandApart, ...], operands: int, dependence: dict[str, dict[str, float]]
    ) -> Certificate:
        """The certificate over all batches that have been compared."""
        logits = (self.wrong / self.all) ** 0.5 if self.all else 0.0
        means = self.kl / self.positions, self.kl_max, self.largest, self.where, self.same / self.positions
        return Certificate(self.positions, *means, logits, apart, operands, dependence)


Heard = dict[tuple[str, str], Operand]
"""``(layer, "weight" or "input") -> operand`` of its first product, in order."""


@contextmanager
def _operands(model: nn.Module, recipe: Recipe | None) -> Generator[Heard]:
    """Region that notes what each module multiplies."""
    heard: Heard = {}

    def listener(name: str, gemms: Gemms) -> Callable[[Any, Tensor], Callable[[Tensor], None]]:
        def note(inp: Any, weight: Tensor) -> Callable[[Tensor], None]:
            followed = recipe or gemms.recipe
            for what, tensor in (("weight", weight), ("input", inp)):
                if followed is None or (name, what) in heard or not isinstance(tensor, Tensor):
                    continue
                if isinstance(tensor, QuantizedWeight):
                    heard[name, what] = tensor.rowwise
                    continue
                quantizer = make_quantizer(followed, gemms.role(what, followed)).evaluating()
                if not quantizer.draws_in_forward:
                    made = quantizer.quantize(tensor.detach(), columnwise=False).rowwise
                    assert made is not None
                    heard[name, what] = made
            return lambda output: None

        return note

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, Gemms):
                stack.enter_context(module.heard_by(listener(name, module)))
        yield heard


def _apart(trained: Heard, served: Heard) -> Iterable[OperandApart]:
    for (layer, what), wanted in trained.items():
        got = served.get((layer, what))
        if got is None or (wanted.spec is None and got.spec is None and what == "input"):
            continue
        values = [side.dequantize().float() for side in (wanted, got)]
        if values[0].shape != values[1].shape:  # tokens took other experts
            yield OperandApart(layer, what, 0, 0, (), (), 1.0)
            continue
        left, right = map(_blocks, (wanted, got))
        differ = (left != right).any(-1) if left.shape == right.shape else _blocked(values[0]) != _blocked(values[1])
        differ = differ if differ.ndim == 2 else differ.any(-1)
        if differ.any():
            row, block = (int(each) for each in differ.nonzero()[0])
            width = values[0].shape[1] // differ.shape[1]
            columns = slice(block * width, (block + 1) * width)
            before, after = (tuple(side[row, columns].tolist()) for side in values)
            yield OperandApart(layer, what, row, block, before, after, float(differ.float().mean()))


def _blocks(operand: Operand) -> Tensor:
    """Codes and scales of each block, bytes [rows, blocks, bytes]; of an operand without scales, of each 16 values."""
    if operand.spec is None or not operand.spec.block[1]:
        return _blocked(operand.data).view(torch.uint8)
    assert operand.scale_inv is not None
    scales = operand.scale_inv.contiguous().view(torch.uint8).view(*operand.scale_inv.shape, -1)
    return torch.cat((operand.codes.view(*operand.scale_inv.shape, -1), scales), dim=-1)


def _blocked(values: Tensor) -> Tensor:
    """[rows, cols] as [rows, cols / 16, 16], padded with zeros."""
    return nn.functional.pad(values, (0, -values.shape[1] % 16)).unflatten(1, (-1, 16)).contiguous()


def _dependence(model: nn.Module, recipe: Recipe | None, batch: Any) -> dict[str, float]:
    """``what a score may depend on -> the largest difference of a log-probability`` of a model that generates."""
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else batch[0] if isinstance(batch, tuple) else batch
    generates: Any = getattr(model, "can_generate", None)
    config: Any = getattr(model, "config", None)
    if not callable(generates) or not generates() or config.is_encoder_decoder or not isinstance(tokens, Tensor):
        return {}

    def scores(part: Tensor, **more: Any) -> Tensor:
        return _logits(model, recipe, {"input_ids": part}, **more).double().log_softmax(-1)

    whole, half = scores(tokens), tokens.shape[1] // 2
    found: dict[str, float] = {}
    if tokens.shape[0] > 1:
        found["the rest of the batch"] = float((scores(tokens[:1]) - whole[:1]).abs().max())
    if half:
        found["later tokens"] = float((scores(tokens[:, :half]) - whole[:, :half]).abs().max())
        output = output_of(model, recipe, {"input_ids": tokens[:, :half], "use_cache": True})
        cache = getattr(output, "past_key_values", None)  # a state-space model keeps a state under another name
        if cache is not None:
            rest = scores(tokens[:, half:], past_key_values=cache)
            found["the cache of keys and values"] = float((rest - whole[:, half:]).abs().max())
    return found
