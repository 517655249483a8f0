"""The weights of a converted model as codes, and back: for adapters trained on a frozen base (QLoRA)."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp4engine.accounting.planned import linear_modules
from fp4engine.arguments import require_model, shown
from fp4engine.checkpoint_names import Piece, checkpoint_pieces, require_like
from fp4engine.modules import QuantizedWeight
from fp4engine.modules.adoption import compute_buffers, forget_storage
from fp4engine.modules.gemms import Gemms
from fp4engine.modules.quantized_weight import decode_parameters
from fp4engine.modules.weight_places import WeightPlace, weight_places
from fp4engine.quantizers import make_quantizer
from fp4engine.quantizers.shared import SharedAmaxQuantizer
from fp4engine.recipe import Recipe
from fp4engine.recipe.base import require_recipe


@dataclass(frozen=True)
class StoredWeights:
    """What :func:`quantize_weights` did.

    Attributes:
        quantized: names of the weights that are codes now.
        left_alone: ``name -> why`` of converted modules whose weight stayed as it was.
        nbytes_before, nbytes_after: bytes of all parameters of the model.
    """

    quantized: tuple[str, ...]
    left_alone: dict[str, str]
    nbytes_before: int
    nbytes_after: int

    def __str__(self) -> str:
        lines = [f"{name} stays as it was: {why}" for name, why in self.left_alone.items()]
        total = f"{self.nbytes_before:,} bytes of parameters became {self.nbytes_after:,}"
        return "\n".join((*lines, f"{len(self.quantized)} weights are stored as codes; {total}"))


def quantize_weights(
    model: nn.Module, recipe: Recipe | None = None, *, weights: Mapping[str, Tensor] | None = None
) -> StoredWeights:
    """Store the weights of converted modules below ``model`` as their codes and scales, frozen, in place.

    These are the weights of what was ``nn.Linear``, ``Conv1D`` or experts in one parameter. Products equal, bit for
    bit, the products of the plain weights under the same recipe; a backward product for which that asks for the
    original weight, as ``backward_override="high_precision"`` does, reads the decoded one. 16x16 blocks take 4.5 bits
    an element; casts that differ by direction are stored for both, in 9 bits. The other parameters are not changed, nor
    is a weight that others share. ``save_pretrained`` of transformers writes what is stored, and ``from_pretrained``
    reads it once ``fp4engine.integrations.transformers`` is imported.

    Args:
        model: converted; on ``meta`` with ``weights``, which then fill every parameter, and every buffer of its
            ``state_dict``, one matrix at a time, so that the model in high precision never exists.
        recipe: what the weights are cast by, and what the model is to run by; None takes the recipe that each module
            was converted with.
        weights: values by the names of parameters and buffers, in the model or in its checkpoints, such as
            ``fp4engine.export.TensorFolder(directory)``.

    Raises:
        ValueError: nothing is to be stored; a module follows no recipe, or one with delayed scaling; ``weights`` is no
            mapping, is given beside a recipe of :func:`fp4engine.export.share_amax` or for a model that stores codes
            already, lacks a name or has another shape; a weight holds a NaN or an Inf; a parameter or buffer is on
            ``meta`` and has no value, and is none that a model of transformers computes. The parameters are then what
            they were.
        NotImplementedError: ``weights`` lacks a parameter by its name in the model, and transformers writes it in
            another way than in parts of its rows.
    """
    require_model(model)
    require_recipe(recipe)
    if weights is not None and not isinstance(weights, Mapping):
        raise ValueError(f"weights must be a mapping of names to tensors or None, got {shown(weights)}")
    places = weight_places(model)
    quantizers, left_alone = _quantizers(model, places, recipe)
    if not quantizers:
        reasons = "".join(f"; {name}: {reason}" for name, reason in list(left_alone.items())[:3])
        raise ValueError(
            f"no weight of this {type(model).__name__} is to be stored as codes: fp4engine.convert(model, recipe) "
            f"comes first, or pass recipe= with a weight that is quantized{reasons}"
        )
    if weights is not None and any(isinstance(made, SharedAmaxQuantizer) for made in quantizers.values()):
        raise ValueError(
            "siblings that share an amax cannot be filled one at a time: load the model, then leave weights out"
        )
    stored = [name for name, parameter in model.named_parameters() if isinstance(parameter, QuantizedWeight)]
    if weights is not None and stored:
        raise ValueError(f"weights fill a model in high precision, and {stored[0]!r} is stored as codes already")
    before = _nbytes(model)
    compute_buffers(model)
    of_parameter = {places[name].name: name for name in quantizers}
    values = _Values(model, weights)
    # All are made before the first is replaced: an error replaces none, and siblings that share an amax see each other.
    made: dict[Tensor, Tensor] = {}
    parameters = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters:
        layer = of_parameter.get(name)
        if parameter in made:
            continue
        if layer is not None:
            made[parameter] = _stored(values, places[layer], quantizers[layer])
        elif weights is None:
            made[parameter] = _require_value(name, parameter)
        else:
            made[parameter] = nn.Parameter(values.of(name, parameter).clone(), parameter.requires_grad)
    # All buffers of the model's state, since accelerate.init_empty_weights leaves them the values they were made with.
    state = () if weights is None else model.state_dict(keep_vars=True)
    buffers = [each for each in model.named_buffers(remove_duplicate=False) if each[1].is_meta or each[0] in state]
    for name, buffer in buffers:
        if buffer not in made:
            value = values.of(name, buffer)
            made[buffer] = value.to(value.device if buffer.is_meta else buffer.device, copy=True)
    for name, tensor in parameters + buffers:
        owner, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(owner), own_name, made[tensor])
    describe_stored(model)
    return StoredWeights(tuple(of_parameter), left_alone, before, _nbytes(model))


def describe_stored(model: nn.Module) -> None:
    """Let ``save_pretrained`` write the stored weights of a model of transformers."""
    if "transformers" in sys.modules:
        from fp4engine.integrations.stored_weights import describe_in

        describe_in(model)


def dequantize_weights(model: nn.Module) -> tuple[str, ...]:
    """Replace every weight that is stored as codes by the values that it decodes to; the names of these weights.

    Raises:
        ValueError: there is none.
    """
    require_model(model)
    decoded = tuple(
        f"{name}.{own}" if name else own for name, module in model.named_modules() for own in decode_parameters(module)
    )
    if not decoded:
        raise ValueError(f"no weight of this {type(model).__name__} is stored as codes")
    forget_storage(model)
    return decoded


def _quantizers(
    model: nn.Module, places: Mapping[str, WeightPlace], recipe: Recipe | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """``(name -> quantizer of the weight, name -> why there is none)``, of everything that follows recipes."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    quantizers: dict[str, Any] = {}
    left_alone: dict[str, str] = {}
    for name, first in linear_modules(model):
        if not isinstance(first, Gemms):
            continue
        place = places.get(name)
        if place is None:
            left_alone[name] = "only weights of nn.Linear, Conv1D and experts are stored as codes"
            continue
        made = {_quantizer(name, gemms, recipe) for gemms in place.gemms}
        quantizer, weight = made.pop(), place.weight
        others = [other for other in names.get(weight, ()) if other != place.name] if weight is not None else []
        if weight is None:
            left_alone[name] = "its weight is computed, not a parameter"
        elif isinstance(weight, QuantizedWeight):
            left_alone[name] = "it is stored as codes already"
        elif others:
            left_alone[name] = f"it is also {others[0]}"
        elif unseen := first.unseen:
            left_alone[name] = f"its casts are not those of the weight: {unseen}"
        elif made:
            left_alone[name] = "its experts follow several recipes"
        elif quantizer.rowwise_spec is None:
            left_alone[name] = "its recipe multiplies it in high precision"
        else:
            quantizers[name] = quantizer
    return quantizers, left_alone


def _quantizer(name: str, gemms: Gemms, recipe: Recipe | None) -> Any:
    own = recipe or gemms.recipe
    if own is None:
        raise ValueError(f"{name!r} follows autocast regions only: pass the recipe of those regions as recipe=")
    if own.is_delayed:
        raise ValueError(f"a weight is stored by its own amax, and {own!r} scales by those of earlier steps")
    return make_quantizer(own, gemms.role("weight", own))


class _Values:
    """Values of parameters and buffers: the model's own, or from ``weights``."""

    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor] | None) -> None:
        self._model, self._weights = model, weights
        self._pieces: dict[str, list[Piece]] | None = None

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """The value of ``tensor``, which the model calls ``name``."""
        if self._weights is None:
            return _require_value(name, tensor)
        if name in self._weights:
            return self._read(name, tuple(tensor.shape), tensor.dtype)
        pieces = self._pieces_of(name)
        if any(piece.expert is not None for piece in pieces):
            return torch.stack(list(self.matrices(name, tensor)))
        return torch.cat([self._read(piece.name, piece.shape, tensor.dtype) for piece in pieces])

    def matrices(self, name: str, tensor: Tensor) -> Iterator[Tensor]:
        """The matrices of a stack, one after the other."""
        pieces = [] if self._weights is None or name in self._weights else self._pieces_of(name)
        if all(piece.expert is None for piece in pieces):
            yield from self.of(name, tensor)
            return
        for expert in range(tensor.shape[0]):
            own = [piece for piece in pieces if piece.expert == expert]
            yield torch.cat([self._read(piece.name, piece.shape, tensor.dtype) for piece in own])

    def _pieces_of(self, name: str) -> list[Piece]:
        """Where checkpoints have the parameter or buffer."""
        if self._pieces is None:
            self._pieces = {}
            for piece in checkpoint_pieces(self._model, self._model.state_dict(keep_vars=True)):
                self._pieces.setdefault(piece.source, []).append(piece)
        assert self._weights is not None
        found = self._pieces.get(name)
        if found is None:
            tensors = dict(self._model.named_parameters()) | dict(self._model.named_buffers())
            _require_value(name, tensors[name])
        missing = [piece.name for piece in found or () if piece.name not in self._weights]
        if found is None or missing:
            lacking = missing[0] if missing else name
            raise ValueError(f"weights lacks {lacking!r}; it has, for example, {', '.join(list(self._weights)[:3])}")
        return found

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        assert self._weights is not None
        value = self._weights[name]
        require_like(name, value, shape, dtype)
        return value.detach().to(dtype)


def _require_value(name: str, tensor: Any) -> Any:
    """``tensor``, if it has values."""
    if tensor.is_meta:
        raise ValueError(
            f"{name!r} is on the meta device and has no value in weights; build the model so that only what the "
            "checkpoint holds is empty, as accelerate.init_empty_weights() does"
        )
    return tensor


def _stored(values: _Values, place: WeightPlace, quantizer: Any) -> nn.Parameter:
    """Codes of a weight.

    Raises:
        ValueError: it holds a NaN or an Inf, which no code stands for.
    """
    parameter = place.weight
    assert parameter is not None
    if parameter.ndim == 3:
        matrices = (
            QuantizedWeight.from_values(_finite(place.name, matrix), quantizer, transposed=place.transposed)
            for matrix in values.matrices(place.name, parameter)
        )
        weight = QuantizedWeight.stacked(matrices)
    else:
        value = _finite(place.name, values.of(place.name, parameter))
        weight = QuantizedWeight.from_values(value, quantizer, transposed=place.transposed)
    weight.is_frozen = True
    if isinstance(quantizer, SharedAmaxQuantizer):
        weight.quantizer = quantizer.alone  # siblings refer to the model
    return nn.Parameter(weight, requires_grad=False)


def _finite(name: str, value: Tensor) -> Tensor:
    if not value.isfinite().all():
        raise ValueError(f"{name!r} holds a NaN or an Inf, which no code stands for; mend the weight first")
    return value.detach()


def _nbytes(model: nn.Module) -> int:
    """Bytes of all parameters; of those on ``meta``, what they would take."""
    return sum(parameter.nbytes for parameter in model.parameters())
