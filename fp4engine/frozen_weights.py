"""The weights of a converted model as codes, and back: for adapters trained on a frozen base (QLoRA)."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp4engine.modules import Linear, QuantizedWeight
from fp4engine.modules.adoption import adopted_names, compute_buffers, forget_storage
from fp4engine.quantizers import make_quantizer
from fp4engine.quantizers.shared import SharedAmaxQuantizer
from fp4engine.recipe import Recipe
from fp4engine.roles import QuantizerRole


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
    """Store the weight of every :class:`fp4engine.Linear` below ``model`` as its codes and scales, frozen, in place.

    Its products are, bit for bit, those of the plain weight under the same recipe. What 16x16 blocks take is 4.5 bits
    an element; casts that differ by direction are stored for both, in 9. The other parameters stay as they are, and a
    weight that others share stays plain. ``save_pretrained`` of transformers writes what is stored, and
    ``from_pretrained`` reads it once ``fp4engine.integrations.transformers`` is imported.

    Args:
        model: converted; on ``meta`` with ``weights``, which then fill every parameter, one at a time, so that the
            model in high precision never exists.
        recipe: what the weights are cast by, and what the model is to run by; None takes the recipe that each module
            was converted with.
        weights: values by the names of parameters and buffers, such as ``fp4engine.export.TensorFolder(directory)``.

    Raises:
        ValueError: nothing is to be stored; a module follows no recipe, or one with delayed scaling; ``weights`` is
            given beside a recipe of :func:`fp4engine.export.share_amax`, lacks a name or has another shape; a
            parameter or buffer is on ``meta`` and has no value, and is none that a model of transformers computes.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    quantizers, left_alone = _quantizers(model, layers, recipe)
    left_alone |= {name: "only weights of nn.Linear are stored as codes" for name in adopted_names(model)}
    if not quantizers:
        raise ValueError(
            f"no weight of this {type(model).__name__} is to be stored as codes: fp4engine.convert(model, recipe) "
            "comes first, or pass recipe= with a weight that is quantized"
        )
    if weights is not None and any(isinstance(made, SharedAmaxQuantizer) for made in quantizers.values()):
        raise ValueError(
            "siblings that share an amax cannot be filled one at a time: load the model, then leave weights out"
        )
    before = _nbytes(model)
    replaced: dict[Tensor, nn.Parameter] = {}
    # Without weights= all codes are made before the first weight goes: siblings that share an amax see each other.
    codes = {} if weights is not None else {n: _stored(layers[n].weight, made) for n, made in quantizers.items()}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if parameter not in replaced:
            value = _value(name, parameter, weights)
            layer = name.removesuffix(".weight")
            if layer != name and layer in quantizers:
                replaced[parameter] = codes[layer] if layer in codes else _stored(value, quantizers[layer])
            elif weights is None:
                replaced[parameter] = parameter
            else:
                replaced[parameter] = nn.Parameter(value.detach().clone(), parameter.requires_grad)
        owner, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(owner), own_name, replaced[parameter])
    compute_buffers(model)
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta:
            owner, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(owner), own_name, _value(name, buffer, weights).clone())
    if "transformers" in sys.modules:
        from fp4engine.integrations.stored_weights import describe_in

        describe_in(model)
    return StoredWeights(tuple(f"{name}.weight" for name in quantizers), left_alone, before, _nbytes(model))


def dequantize_weights(model: nn.Module) -> tuple[str, ...]:
    """Replace every weight that is stored as codes by the values that it decodes to; the names of these weights.

    Raises:
        ValueError: there is none.
    """
    stored = [(name, weight) for name, weight in model.named_parameters() if isinstance(weight, QuantizedWeight)]
    if not stored:
        raise ValueError(f"no weight of this {type(model).__name__} is stored as codes")
    for name, weight in stored:
        owner, _, own_name = name.rpartition(".")
        with torch.no_grad():
            plain = nn.Parameter(weight.dequantize(), weight.requires_grad)
        setattr(model.get_submodule(owner), own_name, plain)
    forget_storage(model)
    return tuple(name for name, _ in stored)


def _quantizers(
    model: nn.Module, layers: Mapping[str, Linear], recipe: Recipe | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """``(name -> quantizer of the weight, name -> why there is none)``."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    quantizers: dict[str, Any] = {}
    left_alone: dict[str, str] = {}
    for name, module in layers.items():
        weight = module._parameters.get("weight")
        own = recipe or module.recipe
        if own is None:
            raise ValueError(f"{name!r} follows autocast regions only: pass the recipe of those regions as recipe=")
        if own.is_delayed:
            raise ValueError(f"a weight is stored by its own amax, and {own!r} scales by those of earlier steps")
        role = QuantizerRole(module.module_type, "weight", module.name, (module.out_features, module.in_features))
        quantizer = make_quantizer(own, role)
        others = [other for other in names.get(weight, ()) if other != f"{name}.weight"] if weight is not None else []
        if weight is None:
            left_alone[name] = "its weight is computed, not a parameter"
        elif isinstance(weight, QuantizedWeight):
            left_alone[name] = "it is stored as codes already"
        elif others:
            left_alone[name] = f"it is also {others[0]}"
        elif quantizer.rowwise_spec is None:
            left_alone[name] = "its recipe multiplies it in high precision"
        else:
            quantizers[name] = quantizer
    return quantizers, left_alone


def _value(name: str, tensor: Tensor, weights: Mapping[str, Tensor] | None) -> Tensor:
    """The value of a parameter or buffer."""
    if weights is None or name not in weights:
        if weights is not None and not tensor.is_meta:
            raise ValueError(f"weights lacks {name!r}; it has, for example, {', '.join(list(weights)[:3])}")
        if tensor.is_meta:
            raise ValueError(
                f"{name!r} is on the meta device and has no value in weights; build the model so that only what the "
                "checkpoint holds is empty, as accelerate.init_empty_weights() does"
            )
        return tensor
    value = weights[name]
    if value.shape != tensor.shape:
        raise ValueError(f"{name!r} has shape {tuple(value.shape)} in weights and {tuple(tensor.shape)} in the model")
    return value.to(tensor.dtype)


def _stored(value: Tensor, quantizer: Any) -> nn.Parameter:
    weight = QuantizedWeight.from_values(value.detach(), quantizer)
    weight.is_frozen = True
    return nn.Parameter(weight, requires_grad=False)


def _nbytes(model: nn.Module) -> int:
    """Bytes of all parameters; of those on ``meta``, what they would take."""
    return sum(parameter.nbytes for parameter in model.parameters())
