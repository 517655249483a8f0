"""Which weights of a model go into a serving checkpoint as codes, by which casts, and which scales they share.

Legend: N out_features, K in_features of a weight [N, K].
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from fp4engine.accounting.planned import linear_modules, linear_shape, other_matrices
from fp4engine.accounting.table import collapsed, patterns_for
from fp4engine.arguments import require_patterns
from fp4engine.checkpoint_names import Piece
from fp4engine.export.recoding import LOSSLESS, recoded, recoded_amax
from fp4engine.export.serving_format import MXFP4, NVFP4, WeightForm, form_of
from fp4engine.export.slabs import Slabs
from fp4engine.export.state import ModelState
from fp4engine.formats import CastSpec, Outer
from fp4engine.modules import Linear, QuantizedWeight
from fp4engine.modules.adoption import is_conv1d
from fp4engine.modules.borrowed import BorrowedGroupedLinear, BorrowedLinear
from fp4engine.modules.gemms import Gemms
from fp4engine.modules.learned_scales import scales_of
from fp4engine.modules.shared_amax import sibling_groups
from fp4engine.names import covers
from fp4engine.quantizers import Quantizer, make_quantizer
from fp4engine.recipe import Recipe, ScheduledRecipe

Requantize = bool | Literal["lossless"]
"""Whether casts that no form holds become nearest NVFP4; or whether MXFP4 becomes NVFP4 of the same values."""


@dataclass(frozen=True)
class ExportLayer:
    """One weight that is written as codes.

    Attributes:
        name: the dotted name of its module in checkpoints, which its tensors' names begin with.
        module: the dotted name, in the model, of the module that multiplies by it; experts may share one.
        shape: (N, K).
        quantizer: casts the operand that this weight is, or whose rows it is a part of.
        form: how it is stored; NVFP4 of an operand in MXFP4 holds the same values.
        input_spec: cast of the input in the recipe's forward pass; None: high precision.
        requantized: why the casts differ from the recipe's; empty if they do not.
        operand: names of the layers whose rows, in this order, make one operand of the model, itself included.
        transposed: True if checkpoints have it as [K, N] in high precision, as they do ``Conv1D``.
        group: names of the layers that share this one's outer scales, itself included.
    """

    name: str
    module: str
    shape: tuple[int, int]
    quantizer: Quantizer
    form: WeightForm
    input_spec: CastSpec | None
    requantized: str
    operand: tuple[str, ...]
    transposed: bool
    group: tuple[str, ...] = ()

    @property
    def spec(self) -> CastSpec:
        """Cast of the weight."""
        assert self.quantizer.rowwise_spec is not None
        return self.quantizer.rowwise_spec

    @property
    def numerator(self) -> float:
        """What an outer amax is divided by."""
        return self.form.spec.numerator if self.is_recoded else self.spec.numerator

    @property
    def is_recoded(self) -> bool:
        """True if an operand in MXFP4 is stored as NVFP4."""
        return self.form is NVFP4 and form_of(self.spec) is MXFP4

    def stored(self, codes: Tensor, scale_inv: Tensor, amax: Tensor) -> tuple[Tensor, ...]:
        """Codes and block scales as files have them, of an operand that is scaled by ``amax``, FP32 [1] on the CPU.

        Raises:
            ValueError: MXFP4 that NVFP4 cannot hold.
        """
        if not self.is_recoded:
            return self.form.stored(codes, scale_inv)
        return codes, recoded(self.name, codes, scale_inv, amax)

    def weight(self, state: ModelState) -> Tensor:
        """[N, K]."""
        tensor = state[f"{self.name}.weight"]
        if not self.transposed:
            return tensor
        return tensor.matrices()[0] if isinstance(tensor, QuantizedWeight) else tensor.T


class _Casts(NamedTuple):
    """How a module of the model casts its weight and its input, and how the weight is stored; see ExportLayer."""

    quantizer: Quantizer
    form: WeightForm
    input_spec: CastSpec | None
    requantized: str


def export_layers(
    model: nn.Module,
    state: ModelState,
    recipe: Recipe | None,
    keep_high_precision: Sequence[str],
    shared_scales: Iterable[Sequence[str]],
    requantize: Requantize,
) -> tuple[dict[str, ExportLayer], dict[str, str]]:
    """``(name -> layer, name -> why a module is not quantized)`` for every module of ``model`` that multiplies.

    Both have the names of modules in checkpoints.

    Raises:
        ValueError: a module that follows no recipe, has no name that servers know, or has a cast or shape that the
            formats cannot hold; a pattern that covers nothing; a group of which only a part is FP4; nothing is FP4.
    """
    left_alone: dict[str, str] = {}
    layers: dict[str, ExportLayer] = {}
    quantized: list[str] = []
    ragged: dict[str, str] = {}
    linears = dict(linear_modules(model))
    for pattern in require_patterns("keep_high_precision", keep_high_precision):
        if not any(covers(pattern, name) for name in linears):
            raise ValueError(f"pattern {pattern!r} covers no linear module of the model")
    for name, first in linears.items():
        module = model.get_submodule(name)
        if scales_of(module) is not None:
            raise ValueError(
                f"{name!r} still learns the scales of its weight: call fp4engine.qat.finalize(model), which stores the "
                "weight under them"
            )
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
                cols, form = linear_shape(first)[1], casts.form
                if cols % form.col_multiple:
                    held = f"{form.name} holds whole blocks of {form.col_multiple} only"
                    ragged[name] = f"has in_features={cols}, and {held}"
                    continue
                if form is MXFP4 and requantize == LOSSLESS:
                    casts = casts._replace(form=NVFP4)
                quantized += sources
                layers |= _layers(name, module, casts, pieces)
                continue
            why = "its recipe multiplies the weight in high precision"
        left_alone |= dict.fromkeys((piece.module for piece in pieces), why) or {name: why}
    if ragged:
        said = "; ".join(f"{name} {why}" for name, why in collapsed(ragged.items()))
        # a command converts anew by the patterns that it is given, and would cast what convert has left alone
        kept = [name for name, first in linears.items() if not isinstance(first, Gemms)]
        wanted = dict.fromkeys([*kept, *ragged])
        keep = [*keep_high_precision, *patterns_for(wanted, linears.keys() - wanted.keys())]
        raise ValueError(f"{said}: pass keep_high_precision={keep}")
    _refuse_tied(model, quantized)
    if not layers:
        raise ValueError(
            f"no weight of this {type(model).__name__} is cast: fp4engine.convert(model, recipe) comes first, or pass "
            "recipe= with a weight in FP4 or FP8"
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
    requantize: Requantize,
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
    quantizer, inp = (make_quantizer(recipe, gemms.role(tensor, recipe)) for tensor in ("weight", "input"))
    for weight in stored:
        if weight.quantizer.rowwise_spec != quantizer.rowwise_spec:
            raise ValueError(
                f"{name!r} is stored as {_words(weight.quantizer.rowwise_spec)} and its recipe multiplies "
                f"{_words(quantizer.rowwise_spec)}; pass the recipe that it was stored by"
            )
    if quantizer.rowwise_spec is None:
        return None
    form: WeightForm | str = form_of(quantizer.rowwise_spec)
    if quantizer.is_stateful:
        form = "its scale comes from earlier steps"
    why = form if isinstance(form, str) else ""
    if why and requantize is not True:
        raise ValueError(
            f"{name!r} is multiplied as {_words(quantizer.rowwise_spec)}, which no checkpoint for servers holds: "
            f"{why}; requantize=True (on the command line --requantize) casts it to nearest NVFP4 instead, which is "
            "not what was trained"
        )
    if isinstance(form, str):
        quantizer, form = Quantizer(CastSpec(), CastSpec(), backend=quantizer.backend), NVFP4
    return _Casts(quantizer, form, inp.rowwise_spec, why)


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
                f"{list(piece.shape)}; servers know no codes of it: pass keep_high_precision=[{name!r}]"
            )
        if 0 in piece.shape:
            raise ValueError(
                f"{name!r} multiplies by {piece.source!r} {list(piece.shape)}, which has no values to write: pass "
                f"keep_high_precision=[{name!r}]"
            )
        if piece.rows is not None and any(row % max(spec.block[0], 1) for row in piece.rows):
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
        made[piece.module] = ExportLayer(piece.module, name, (rows, cols), *casts, operand, transposed)
    return made


def _words(spec: CastSpec | None) -> str:
    return "high precision" if spec is None else f"{spec.label!r}"


def _refuse_tied(model: nn.Module, sources: Iterable[str]) -> None:
    """Raise if a parameter in ``sources``, which are to be codes, is also one of a module that would lose it."""
    owners: defaultdict[Tensor, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners[parameter].append(name)
    found = set(sources)
    for names in owners.values():
        both = [name for name in names if name in found]
        if both and len(names) > 1:
            layer = both[0].removesuffix(".weight")
            raise ValueError(
                f"{layer!r} is cast and shares its parameter with {', '.join(n for n in names if n != both[0])}; "
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
                f"servers multiply {', '.join(names)} as one matrix, and only {', '.join(quantized)} would be codes "
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
    """Outer amaxes of layers, FP32 [1] on the CPU, each found once."""

    def __init__(self, layers: Mapping[str, ExportLayer], state: ModelState, slabs: Slabs) -> None:
        self._layers, self._state, self._slabs = layers, state, slabs
        self._found: dict[str, Tensor] = {}

    def shared(self, layer: ExportLayer) -> Tensor:
        """The largest amax of those that share the layer's outer scale; its own where it has none."""
        return self._largest(layer.group) if layer.form.has_outer_scale else self.own(layer)

    def own(self, layer: ExportLayer) -> Tensor:
        """The amax of the operand of the model that the layer is, or is a part of."""
        return self._largest(layer.operand)

    def _largest(self, names: Iterable[str]) -> Tensor:
        return torch.stack([self._one(name) for name in names]).amax(0)

    def _one(self, name: str) -> Tensor:
        if name not in self._found:
            layer = self._layers[name]
            self._found[name] = _outer_amax(layer, layer.weight(self._state), self._slabs)
        return self._found[name]


def _outer_amax(layer: ExportLayer, weight: Tensor, slabs: Slabs) -> Tensor:
    """Outer amax of a weight [N, K] under the layer's cast, or its largest magnitude if that has none, FP32 [1].

    Raises:
        ValueError: the weight holds a NaN or an Inf.
    """
    if isinstance(weight, QuantizedWeight) and layer.spec.outer is Outer.TENSOR:
        amax = weight.tensors()[2].cpu()
    else:

        def part(rows: slice) -> Tensor:
            if layer.spec.outer is Outer.TENSOR:
                found, _ = layer.quantizer.amax(weight[rows], columnwise=False)
                assert found is not None
                return found.cpu()
            largest = values[rows].abs().amax().float().reshape(1).cpu()
            if not layer.is_recoded or not largest.isfinite():
                return largest
            return recoded_amax(*_operand(layer, weight, rows))

        values = weight.dequantize().detach() if isinstance(weight, QuantizedWeight) else weight
        amax = torch.stack(list(slabs.map(part, values, max(layer.spec.block[0], 1)))).amax(0)
    if not amax.isfinite().all():
        raise ValueError(f"the weight of {layer.name!r} holds a NaN or an Inf: there is nothing to serve")
    return amax


def _operand(layer: ExportLayer, weight: Tensor, rows: slice, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes and block scales of some rows of a weight [N, K], whole blocks of them.

    Args:
        amax: the outer amax to cast values by. A weight that is stored as codes is not cast again.
    """
    if isinstance(weight, QuantizedWeight):
        return weight.tensors()[0][rows], weight.tensors()[1][rows]
    operand = layer.quantizer.quantize(weight[rows], columnwise=False, rowwise_amax=amax).rowwise
    assert operand is not None and operand.scale_inv is not None
    return operand.codes, operand.scale_inv


def encode(
    layer: ExportLayer, weight: Tensor, amax: Tensor, factor: float, slabs: Slabs
) -> tuple[tuple[Tensor, ...], float]:
    """Codes and block scales as files have them, and ``|decoded - weight| / |weight|``, of a weight [N, K].

    Args:
        amax: outer amax, FP32 [1] on the CPU. The error of a weight of zeros is 0.
        factor: what readers multiply ``element * block scale`` by.
    """
    dtypes = {"U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32}
    made = tuple(torch.empty(shape, dtype=dtypes[dtype]) for dtype, shape in layer.form.described(*layer.shape))
    heights = (1, layer.form.spec.block[0])
    exact = weight
    if isinstance(weight, QuantizedWeight):
        exact = weight.dequantize().detach()
        if layer.spec.outer is Outer.TENSOR and not torch.equal(weight.tensors()[2].cpu(), amax):
            weight = exact
    outer = amax.to(weight.device)

    def part(rows: slice) -> tuple[float, float]:
        parts = layer.stored(*_operand(layer, weight, rows, outer), amax)
        for tensor, slab, height in zip(made, parts, heights, strict=False):
            tensor[rows.start // height : -(-rows.stop // height)] = slab
        values = exact[rows].cpu().float()
        wrong = layer.form.decode(*(part.cpu() for part in parts)) * factor - values
        largest = float(values.abs().amax()) or 1.0  # before they are squared, which FP32 may not hold
        squares = (float((x / largest).square().sum()) * largest**2 for x in (wrong, values))
        return next(squares), next(squares)

    wrong, total = map(sum, zip(*slabs.map(part, exact, max(layer.spec.block[0], 1)), strict=True))
    return made, (wrong / total) ** 0.5 if total else 0.0
