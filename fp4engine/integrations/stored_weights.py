"""``save_pretrained`` and ``from_pretrained`` of models whose weights are stored as codes.

Files hold ``codes``, ``scale_inv`` and ``amax`` of each weight as plain tensors, by the name of the module that
multiplies by it, and ``config.json`` says by which casts and which recipe: nothing has to be unpickled. Importing this
module tells transformers how to read them.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fp4engine.arguments import shown
from fp4engine.convert import convert
from fp4engine.formats import CastSpec
from fp4engine.modules import Linear, QuantizedWeight
from fp4engine.modules.adoption import adopted_names
from fp4engine.modules.gemms import Gemms
from fp4engine.modules.quantized_weight import STORED, require_stored, stored_as
from fp4engine.modules.shared_amax import without_sharing
from fp4engine.modules.weight_places import weight_places
from fp4engine.quantizers import Quantizer
from fp4engine.recipe import recipe_from_json

METHOD = "fp4engine"
"""What ``config.json`` calls it."""

_CODES = f".weight_{STORED[0]}"

_CASTS = ("rowwise", "columnwise", "columnwise_source", "stream", "backend")


class StoredWeightsConfig(QuantizationConfigMixin):
    """What ``config.json`` says of a model whose weights are stored as codes.

    Attributes:
        recipe: JSON object of the recipe that its modules follow; None: they follow autocast regions only.
        converted: names of the modules that follow it.
        weights: casts, each with the names of the modules whose weight is stored by them.
    """

    def __init__(
        self,
        recipe: dict[str, Any] | None = None,
        converted: list[str] | None = None,
        weights: list[dict[str, Any]] | None = None,
        **_: Any,
    ) -> None:
        self.quant_method = METHOD  # pyright: ignore[reportAttributeAccessIssue]
        self.recipe, self.converted, self.weights = recipe, converted or [], weights or []

    def quantizers(self) -> dict[str, Quantizer]:
        """``name of a module -> the quantizer whose casts its weight is stored in``.

        Raises:
            ValueError: ``weights`` is no list of casts with names of modules.
        """
        found: dict[str, Quantizer] = {}
        if not isinstance(self.weights, list):
            raise ValueError(f"config.json has no casts of stored weights: weights={shown(self.weights)} is no list")
        for entry in self.weights:
            try:
                row, col, source, stream, backend = (entry[name] for name in _CASTS)
                specs = (CastSpec.from_key(row), None if col is None else CastSpec.from_key(col))
                found |= dict.fromkeys(entry["modules"], Quantizer(*specs, source, stream, backend))
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise ValueError(f"config.json has no casts of stored weights: {entry!r:.120} ({error})") from error
        return found


class StoredWeightsQuantizer(HfQuantizer):
    """What transformers asks about a model whose weights :func:`fp4engine.quantize_weights` has stored."""

    quantization_config: StoredWeightsConfig

    def is_serializable(self) -> Any:
        return True

    @property
    def is_trainable(self) -> Any:
        """Adapters train on top."""
        return True

    def get_state_dict_and_metadata(self, model: Any) -> Any:
        """The state with every stored weight in its parts; the configuration is brought up to date.

        Raises:
            ValueError: modules follow recipes of several kinds, or one that has no JSON.
        """
        model.config.quantization_config = self.quantization_config = description(model)
        modules = {place.name: name for name, place in weight_places(model).items()}
        state: dict[str, Any] = {}
        for name, tensor in model.state_dict().items():
            if isinstance(tensor, QuantizedWeight):
                # By the parameter's own name, transformers would take the parts for experts that it is to split.
                parts = zip(STORED, tensor.tensors(), strict=False)
                state |= {f"{modules[name]}.weight_{part}": value.detach() for part, value in parts}
            else:
                state[name] = tensor
        return state, {}

    def _process_model_before_weight_loading(self, model: nn.Module, checkpoint_files: Any = None, **_: Any) -> None:
        """Convert the model, and put the parts of stored weights in the weights' places.

        Raises:
            ValueError: ``config.json`` describes something else than the model and the files.
        """
        config = self.quantization_config
        recipe = None if config.recipe is None else recipe_from_json(json.dumps(config.recipe))
        stored = config.quantizers()
        keys = _keys(checkpoint_files)
        names = _names_in(model, [*config.converted, *stored], keys)
        converted = {names[name] for name in config.converted if name in names}
        self._quantizers = quantizers = {names[name]: made for name, made in stored.items() if name in names}
        convert(model, recipe, lambda _, name: name in converted)
        self._places = weight_places(model)
        if unknown := sorted({*quantizers} - {*self._places}):
            raise ValueError(f"config.json says that {unknown[0]!r} is stored as codes, and it is no linear module")
        for name, quantizer in quantizers.items():
            place = self._places[name]
            weight = place.weight
            assert weight is not None
            parts = stored_as(weight.shape, weight.dtype, quantizer, place.transposed)
            for part, tensor in zip(STORED, parts, strict=False):
                place.module.register_parameter(f"weight_{part}", nn.Parameter(tensor, requires_grad=False))
            # No parameter, since no file has it; something, since the model's own initialisation asks for it.
            absent = torch.empty_like(weight, requires_grad=False)
            absent._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]
            place.owner.register_parameter(place.parameter, None)
            vars(place.owner)[place.parameter] = absent
        _require_described(keys, stored)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        """Make the weights of their parts.

        Raises:
            ValueError: the checkpoint lacks a part, which transformers has filled with whatever the memory held, or
                has one of another shape or dtype, which transformers before 5.20 takes.
        """
        for name, quantizer in self._quantizers.items():
            place = self._places[name]
            parts = [place.module._parameters.pop(f"weight_{part}", None) for part in STORED]
            for part, tensor in zip(STORED, parts, strict=True):
                if tensor is not None and not getattr(tensor, "_is_hf_initialized", False):
                    lacking = f"{name}.weight_{part}"
                    raise ValueError(f"the checkpoint lacks {lacking!r}, a part of a weight that is stored as codes")
            tensors = [part.detach() for part in parts if part is not None]
            absent = vars(place.owner).pop(place.parameter)
            shape, dtype = tuple(absent.shape), absent.dtype
            try:
                require_stored(tensors, shape, dtype, quantizer, place.transposed)
            except ValueError as error:
                raise ValueError(f"the checkpoint has something else of {name!r}: {error}") from error
            weight = QuantizedWeight(quantizer, shape, dtype, tensors, place.transposed)
            weight.is_frozen = True
            place.owner._parameters[place.parameter] = nn.Parameter(weight, requires_grad=False)
        return model


register_quantization_config(METHOD)(StoredWeightsConfig)
register_quantizer(METHOD)(StoredWeightsQuantizer)


def describe_in(model: nn.Module) -> None:
    """Let ``save_pretrained`` of ``model``, where it is a model of transformers, write its stored weights."""
    if isinstance(model, PreTrainedModel):
        configuration = StoredWeightsConfig()
        vars(model)["hf_quantizer"] = StoredWeightsQuantizer(configuration)
        model.config.quantization_config = configuration
        vars(model)["quantization_method"] = METHOD


def description(model: nn.Module) -> StoredWeightsConfig:
    """What ``config.json`` is to say of ``model``.

    Raises:
        ValueError: modules follow recipes of several kinds, or one that has no JSON.
    """
    linears = [name for name, module in model.named_modules() if isinstance(module, Linear)]
    converted = [*linears, *adopted_names(model)]
    recipes = {module.recipe for module in model.modules() if isinstance(module, Gemms)}
    if len(recipes) > 1:
        raise ValueError(
            f"the modules of this {type(model).__name__} follow {len(recipes)} recipes, and its checkpoint holds one: "
            "fp4engine.convert(model, RuledRecipe(...)) says them all"
        )
    recipe = recipes.pop() if recipes else None
    groups: defaultdict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, place in weight_places(model).items():
        weight = place.weight
        if isinstance(weight, QuantizedWeight):
            groups[weight.description()].append(name)
    weights = [dict(zip(_CASTS, casts, strict=True)) | {"modules": names} for casts, names in groups.items()]
    data = None if recipe is None else json.loads(without_sharing(recipe).to_json())
    return StoredWeightsConfig(data, converted, weights)


def _names_in(model: Any, names: Iterable[str], keys: Iterable[str]) -> dict[str, str]:
    """``module in the checkpoint -> module in model``; one of the two may be a model with its head, the other without.

    A head in the checkpoint that ``model`` does not have is left out.

    Args:
        keys: of the tensors in the checkpoint.
    """
    prefix = f"{model.base_model_prefix}."
    has_head = any(name.startswith(prefix) for name in (*names, *keys))
    own = {name for name, _ in model.named_modules()}
    is_alike = has_head == hasattr(model, model.base_model_prefix)
    if not model.base_model_prefix or is_alike or not own.isdisjoint(names):
        return {name: name for name in names}
    if has_head:
        return {name: name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    return {name: f"{prefix}{name}" for name in names}


def _keys(files: Any) -> list[str]:
    """The keys of all tensors in ``files``.

    Raises:
        ValueError: they are no safetensors files that can be read.
    """
    from safetensors import SafetensorError, safe_open

    if not files or not all(str(file).endswith(".safetensors") for file in files):
        raise ValueError(f"weights that are stored as codes are read from safetensors files only, got {files!r:.80}")
    keys: list[str] = []
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                keys += opened.keys()
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is truncated or no safetensors file: {error}") from error
    return keys


def _require_described(keys: Iterable[str], stored: Mapping[str, Quantizer]) -> None:
    """Raise unless ``keys`` have the codes of no more weights than ``stored``: the others would stay at random.

    Names are not compared, since transformers may rename them.
    """
    coded = [key for key in keys if key.endswith(_CODES)]
    if len(coded) > len(stored):
        odd = next(name for name in sorted(coded) if name.removesuffix(_CODES) not in stored)
        raise ValueError(
            f"the files have the codes of {len(coded)} weights, {odd!r} among them, and the weights of "
            f"quantization_config in config.json say by which casts {len(stored)} are stored: save the model anew"
        )
