"""Which weights of a model go into a serving checkpoint as FP4, by which casts, and which scales they share.

Legend: N out_features, K in_features of a weight [N, K].
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fp4engine.accounting.planned import linear_modules, linear_shape, other_matrices
from fp4engine.arguments import require_patterns
from fp4engine.checkpoint_names import Piece
from fp4engine.constants import BLOCK_SIZE
from fp4engine.export.slabs import Slabs
from fp4engine.export.state import ModelState
from fp4engine.formats import E2M1, E4M3, CastSpec, Correction, Outer
from fp4engine.modules import Linear, QuantizedWeight
from fp4engine.modules.adoption import is_conv1d
from fp4engine.modules.borrowed import BorrowedGroupedLinear, BorrowedLinear
from fp4engine.modules.gemms import Gemms
from fp4engine.modules.shared_amax import sibling_groups
from fp4engine.names import covers
from fp4engine.quantizers import Quantizer, make_quantizer
from fp4engine.recipe import Recipe, ScheduledRecipe
from fp4engine.reference import decode


@dataclass(frozen=True)
class ExportLayer:
    """One weight that is written as FP4.

    Attributes:
        name: the dotted name of its module in checkpoints, which its tensors' names begin with.
        module: the dotted name, in the model, of the module that multiplies by it; experts may share one.
        shape: (N, K).
        quantizer: casts the operand that this weight is, or whose rows it is a part of.
        input_spec: cast of the input in the recipe's forward pass; None: high precision.
        group: names of the layers that share this one's outer scales, itself included.
        operand: names of the layers whose rows, in this order, make one operand of the model, itself included.
        transposed: True if checkpoints have it as [K, N] in high precision, as they do ``Conv1D``.
        requantized: why the casts are not those of the recipe; empty if they are.
    """

    name: str
    module: str
    shape: tuple[int, int]
    quantizer: Quantizer
    input_spec: CastSpec | None
    group: tuple[str, ...]
    operand: tuple[str, ...]
    transposed: bool = False
    requantized: str = ""

    @property
    def spec(self) -> CastSpec:
        """Cast of the weight."""
        assert self.quantizer.rowwise_spec is not None
        return self.quantizer.rowwise_spec

    def weight(self, state: ModelState) -> Tensor:
        """[N, K]."""
        tensor = state[f"{self.name}.weight"]
        if not self.transposed:
            return tensor
        return tensor.matrices()[0] if isinstance(tensor, QuantizedWeight) else tensor.T


@dataclass(frozen=True)
class _Casts:
    """How a module of the model casts its weight and its input."""

    quantizer: Quantizer
    input_spec: CastSpec | None
    requantized: str


def export_layers(
    model: nn.Module,
    state: ModelState,
    recipe: Recipe | None,
    keep_high_precision: Sequence[str],
    shared_scales: Iterable[Sequence[str]],
    requantize: bool,
) -> tuple[dict[str, ExportLayer], dict[str, str]]:
    """``(name -> layer, name -> why the module stays as it is)`` of everything by which ``model`` multiplies.

    Both have the names of modules in checkpoints.

    Raises:
        ValueError: a module that follows no recipe, has no name that servers know, or has a cast or shape that the
            formats cannot hold; a pattern that covers nothing; a group of which only a part is FP4; nothing is FP4.
    """
    left_alone: dict[str, str] = {}
    layers: dict[str, ExportLayer] = {}
    quantized: list[str] = []
    linears = dict(linear_modules(model))
    _require_patterns(linears, keep_high_precision)
    for name, first in linears.items():
        module = model.get_submodule(name)
        sources = _sources(name, module)
        pieces = [piece for source in sources for piece in state.of(source)]
        pattern = next((pattern for pattern in keep_high_precision if covers(pattern, name)), None)
        if not isinstance(first, Gemms):
            why = "it was not converted"
        elif pattern is not None:
            why = f"kept by {pattern!r}"
        else:
            if not sources:
                raise ValueError(
                    f"{name!r} multiplies by a weight that it computes, which no checkpoint has: remove its "
                    f"parametrization, or pass keep_high_precision=[{name!r}]"
                )
            if first.unseen:
                raise ValueError(
                    f"{name!r} multiplies by casts that no checkpoint has: {first.unseen}; take the hook off by its "
                    f"remove(), after which the recipe casts all of the weight, or pass keep_high_precision=[{name!r}]"
                )
            stored = [weight for weight in map(model.get_parameter, sources) if isinstance(weight, QuantizedWeight)]
            casts = _casts(name, module, first, stored, recipe, requantize)
            if casts is not None:
                quantized += sources
                layers |= _layers(name, module, casts, pieces)
                continue
            why = "its recipe multiplies the weight in high precision"
        left_alone |= dict.fromkeys((piece.module for piece in pieces), why) or {name: why}
    _refuse_tied(model, quantized)
    if not layers:
        raise ValueError(
            f"no weight of this {type(model).__name__} is FP4: fp4engine.convert(model, recipe) comes first, or pass "
            "recipe= with an FP4 weight"
        )
    for source, matrix in other_matrices(model).items():
        of_modules = (piece for piece in state.of(source) if piece.name.endswith(".weight") or len(piece.shape) > 2)
        left_alone |= dict.fromkeys((piece.module for piece in of_modules), matrix.reason)
    groups = _groups(layers, left_alone, shared_scales)
    return {name: replace(layer, group=groups[name]) for name, layer in layers.items()}, left_alone


def _sources(name: str, module: nn.Module) -> list[str]:
    """Names of the model's tensors by which ``module`` multiplies."""
    if isinstance(module, BorrowedLinear | BorrowedGroupedLinear):
        return [f"{name.rpartition('.')[0]}.{module.parameter}"]
    return [f"{name}.{own}" for own, tensor in module.named_parameters(recurse=False) if tensor.ndim > 1]


def _casts(
    name: str,
    module: nn.Module,
    gemms: Gemms,
    stored: Sequence[QuantizedWeight],
    recipe: Recipe | None,
    requantize: bool,
) -> _Casts | None:
    """How the module ``name`` casts; None if its weight stays in high precision."""
    recipe = recipe or gemms.recipe
    if recipe is None:
        raise ValueError(
            f"{name!r} follows autocast regions only, so which recipe trained it cannot be known: pass recipe="
        )
    if isinstance(recipe, ScheduledRecipe):
        raise ValueError("a schedule has no recipe without a step: pass recipe=schedule.at(last step)")
    if not isinstance(module, Linear | BorrowedGroupedLinear) and not is_conv1d(module):
        kind = "product by in_proj_weight" if isinstance(module, BorrowedLinear) else type(module).__name__
        raise ValueError(
            f"{name!r} is a {kind}, whose parameters no server knows by name; export models whose linear modules were "
            f"nn.Linear, or Conv1D or experts of transformers, or pass keep_high_precision=[{name!r}]"
        )
    shape = linear_shape(gemms)
    quantizer, inp = (make_quantizer(recipe, gemms.role(tensor, recipe)) for tensor in ("weight", "input"))
    for weight in stored:
        if weight.quantizer.rowwise_spec != quantizer.rowwise_spec:
            raise ValueError(
                f"{name!r} is stored as {_words(weight.quantizer.rowwise_spec)} and its recipe multiplies "
                f"{_words(quantizer.rowwise_spec)}; pass the recipe that it was stored by"
            )
    if quantizer.rowwise_spec is None:
        return None
    if shape[1] % BLOCK_SIZE:
        raise ValueError(
            f"{name!r} has in_features={shape[1]}, and both formats hold whole blocks of {BLOCK_SIZE} only; "
            f"pass keep_high_precision=[{name!r}]"
        )
    why = _misfit(quantizer.rowwise_spec)
    if why and not requantize:
        raise ValueError(
            f"{name!r} is multiplied as {_words(quantizer.rowwise_spec)}, which no NVFP4 checkpoint holds: {why}; "
            "requantize=True (on the command line --requantize) casts it to nearest NVFP4 instead, which is not what "
            "was trained"
        )
    if why:
        quantizer = Quantizer(CastSpec(), CastSpec(), backend=quantizer.backend)
    return _Casts(quantizer, inp.rowwise_spec, why)


def _layers(name: str, module: nn.Module, casts: _Casts, pieces: Sequence[Piece]) -> dict[str, ExportLayer]:
    """The layers that ``module``'s weight consists of in checkpoints, by name."""
    spec = casts.quantizer.rowwise_spec
    assert spec is not None
    transposed = is_conv1d(module)
    operands: defaultdict[tuple[str, int | None], list[str]] = defaultdict(list)
    for piece in pieces:
        if len(piece.shape) != 2 or not piece.name.endswith(".weight") or (transposed and piece.rows):
            raise ValueError(
                f"{name!r} multiplies by {piece.source!r}, which checkpoints hold as {piece.name!r} "
                f"{list(piece.shape)}; servers know no FP4 form of it: pass keep_high_precision=[{name!r}]"
            )
        if 0 in piece.shape:
            raise ValueError(
                f"{name!r} multiplies by {piece.source!r} {list(piece.shape)}, which has no values to write: pass "
                f"keep_high_precision=[{name!r}]"
            )
        if piece.rows is not None and any(row % spec.block[0] for row in piece.rows):
            raise ValueError(
                f"{name!r} multiplies by {spec.block[0]}x{spec.block[1]} blocks of {piece.source!r}, and checkpoints "
                f"hold its rows {piece.rows[0]} to {piece.rows[1]} apart, as {piece.name!r}: pass "
                f"keep_high_precision=[{name!r}]"
            )
        operands[piece.operand].append(piece.module)
    made: dict[str, ExportLayer] = {}
    for piece in pieces:
        rows, cols = reversed(piece.shape) if transposed else piece.shape
        operand = tuple(operands[piece.operand])
        made[piece.module] = ExportLayer(
            piece.module,
            name,
            (rows, cols),
            casts.quantizer,
            casts.input_spec,
            (),
            operand,
            transposed,
            casts.requantized,
        )
    return made


def _misfit(spec: CastSpec) -> str:
    """Why an NVFP4 checkpoint cannot hold the operands of ``spec``; empty if it can."""
    if spec.element != E2M1 or spec.scale != E4M3 or spec.block[1] != BLOCK_SIZE:
        return "its elements, scales or blocks are not NVFP4's"
    if spec.outer is not Outer.TENSOR:
        return f"its outer scale is by {spec.outer.value}, and the formats have one for the tensor"
    if spec.rotation is not None:
        return "it is rotated"
    if spec.is_stochastic:
        return "its codes are drawn anew in each forward pass"
    if spec.correction is not Correction.NONE:
        return "its scales are corrected for shrinkage"
    return ""


def _words(spec: CastSpec | None) -> str:
    return "high precision" if spec is None else f"{spec.label!r}"


def _require_patterns(linears: Iterable[str], patterns: Sequence[str]) -> None:
    for pattern in require_patterns("keep_high_precision", patterns):
        if not any(covers(pattern, name) for name in linears):
            raise ValueError(f"pattern {pattern!r} covers no linear module of the model")


def _refuse_tied(model: nn.Module, sources: Iterable[str]) -> None:
    """Raise if a parameter in ``sources``, which are to be FP4, is also one of another module, which would lose it."""
    owners: defaultdict[Tensor, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners[parameter].append(name)
    found = set(sources)
    for names in owners.values():
        both = [name for name in names if name in found]
        if both and len(names) > 1:
            layer = both[0].removesuffix(".weight")
            raise ValueError(
                f"{layer!r} is FP4 and shares its parameter with {', '.join(n for n in names if n != both[0])}; "
                f"convert or export with keep_high_precision=[{layer!r}]"
            )


def _groups(
    layers: Mapping[str, ExportLayer], left_alone: Mapping[str, str], shared_scales: Iterable[Sequence[str]]
) -> dict[str, tuple[str, ...]]:
    """``name -> the names that share its scales``, itself included: siblings, and parts of one operand."""
    siblings = sibling_groups((*layers, *left_alone), shared_scales)
    for names in siblings.values():
        quantized = [name for name in names if name not in left_alone]
        if quantized and len(quantized) < len(names):
            rest = next(name for name in names if name in left_alone)
            raise ValueError(
                f"servers multiply {', '.join(names)} as one matrix, and only {', '.join(quantized)} would be FP4 "
                f"({rest}: {left_alone[rest]}); keep all or none, or leave the group out of shared_scales"
            )
    groups: dict[str, tuple[str, ...]] = {}
    for name, layer in layers.items():
        together = dict.fromkeys((*layer.operand, *siblings.get(name, ())))
        for other in tuple(together):  # and the layers that are one operand with a sibling
            together |= dict.fromkeys(layers[other].operand)
        groups[name] = tuple(together)
    return groups


class Amaxes:
    """Outer amaxes of layers, FP32 [1], each found once."""

    def __init__(self, layers: Mapping[str, ExportLayer], state: ModelState, slabs: Slabs) -> None:
        self._layers, self._state, self._slabs = layers, state, slabs
        self._found: dict[str, Tensor] = {}

    def of(self, names: Iterable[str]) -> Tensor:
        """The largest amax of the layers ``names``, on the CPU."""
        return torch.stack([self._one(name) for name in names]).amax(0)

    def _one(self, name: str) -> Tensor:
        if name not in self._found:
            layer = self._layers[name]
            self._found[name] = _outer_amax(layer, layer.weight(self._state), self._slabs)
        return self._found[name]


def _outer_amax(layer: ExportLayer, weight: Tensor, slabs: Slabs) -> Tensor:
    """Outer amax of a weight [N, K] under the layer's cast, FP32 [1].

    Raises:
        ValueError: the weight holds a NaN or an Inf.
    """
    if isinstance(weight, QuantizedWeight):
        amax = weight.tensors()[2].cpu()
    else:

        def part(rows: slice) -> Tensor:
            found, _ = layer.quantizer.amax(weight[rows], columnwise=False)
            assert found is not None
            return found.cpu()

        amax = torch.stack(list(slabs.map(part, weight, layer.spec.block[0]))).amax(0)
    if not amax.isfinite().all():
        raise ValueError(f"the weight of {layer.name!r} holds a NaN or an Inf: there is nothing to serve")
    return amax


def encode(
    layer: ExportLayer, weight: Tensor, amax: Tensor, factor: float, slabs: Slabs
) -> tuple[Tensor, Tensor, float]:
    """Codes uint8 [N, K/2], block scales E4M3 [N, K/16] and ``|decoded - weight| / |weight|`` of a weight [N, K].

    Args:
        amax: outer amax, FP32 [1] on the CPU. The error of a weight of zeros is 0.
        factor: what readers multiply ``element * block scale`` by.
    """
    rows, cols = layer.shape
    codes = torch.empty(rows, cols // 2, dtype=torch.uint8)
    scales = torch.empty(rows, cols // BLOCK_SIZE, dtype=torch.float8_e4m3fn)
    stored = None
    if isinstance(weight, QuantizedWeight):
        stored = weight.tensors() if torch.equal(weight.tensors()[2].cpu(), amax) else None
        weight = weight.dequantize().detach()
    outer = amax.to(weight.device)

    def part(rows: slice) -> tuple[float, float]:
        if stored is None:
            slab = layer.quantizer.quantize(weight[rows], columnwise=False, rowwise_amax=outer).rowwise
            assert slab is not None and slab.scale_inv is not None
            codes[rows], scales[rows] = slab.codes, slab.scale_inv
        else:
            codes[rows], scales[rows] = stored[0][rows], stored[1][rows]
        exact = weight[rows].cpu().float()
        wrong = decode(codes[rows], scales[rows], layer.spec) * factor - exact
        largest = float(exact.abs().amax()) or 1.0  # before they are squared, which FP32 may not hold
        squares = (float((part / largest).square().sum()) * largest**2 for part in (wrong, exact))
        return next(squares), next(squares)

    wrong, total = map(sum, zip(*slabs.map(part, weight, layer.spec.block[0]), strict=True))
    return codes, scales, (wrong / total) ** 0.5 if total else 0.0
