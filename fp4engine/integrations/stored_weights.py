"""``save_pretrained`` and ``from_pretrained`` of models whose weights are stored as codes.

Files hold ``codes``, ``scale_inv`` and ``amax`` of each weight as plain tensors, and ``config.json`` says by which
casts and which recipe: nothing has to be unpickled. Importing this module tells transformers how to read them.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fp4engine.convert import convert
from fp4engine.formats import CastSpec
from fp4engine.modules import Linear, QuantizedWeight
from fp4engine.modules.adoption import adopted_names
from fp4engine.modules.gemms import Gemms
from fp4engine.modules.quantized_weight import STORED, stored_as
from fp4engine.modules.shared_amax import without_sharing
from fp4engine.quantizers import Quantizer
from fp4engine.recipe import recipe_from_json

METHOD = "fp4engine"
"""What ``config.json`` calls it."""

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
        """``module -> what its weight is stored by``.

        Raises:
            ValueError: the description is of something else.
        """
        found: dict[str, Quantizer] = {}
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
        state: dict[str, Any] = {}
        for name, tensor in model.state_dict().items():
            if isinstance(tensor, QuantizedWeight):
                parts = zip(STORED, tensor.tensors(), strict=False)
                state |= {f"{name}_{part}": value.detach() for part, value in parts}
            else:
                state[name] = tensor
        return state, {}

    def _process_model_before_weight_loading(
        self, model: nn.Module, dtype: Any = None, checkpoint_files: Any = None, **_: Any
    ) -> None:
        """Convert the model, and put the parts of stored weights in the weights' places."""
        config = self.quantization_config
        recipe = None if config.recipe is None else recipe_from_json(json.dumps(config.recipe))
        converted = set(config.converted)
        quantizers = config.quantizers()
        convert(model, recipe, lambda _, name: name in converted)
        layers = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
        if unknown := sorted({*quantizers} - {*layers}):
            raise ValueError(f"config.json says that {unknown[0]!r} is stored as codes, and it is no linear module")
        expected: list[str] = []
        for name, quantizer in quantizers.items():
            layer = layers[name]
            for part, tensor in zip(STORED, stored_as(layer.weight, quantizer), strict=False):
                layer.register_parameter(f"weight_{part}", nn.Parameter(tensor, requires_grad=False))
                expected.append(f"{name}.weight_{part}")
            layer.register_parameter("weight", None)
        _require(expected, checkpoint_files)
        self._dtype = dtype

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        """Make the weights of their parts."""
        for name, quantizer in self.quantization_config.quantizers().items():
            layer = model.get_submodule(name)
            assert isinstance(layer, Linear)
            parts = [layer._parameters.pop(f"weight_{part}", None) for part in STORED]
            tensors = [part.detach() for part in parts if part is not None]
            weight = QuantizedWeight(quantizer, (layer.out_features, layer.in_features), self._dtype, tensors)
            weight.is_frozen = True
            layer.weight = nn.Parameter(weight, requires_grad=False)
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
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    converted = [*layers, *adopted_names(model)]
    recipes = {module.recipe for module in model.modules() if isinstance(module, Gemms)}
    if len(recipes) > 1:
        raise ValueError(
            f"the modules of this {type(model).__name__} follow {len(recipes)} recipes, and its checkpoint holds one: "
            "fp4engine.convert(model, RuledRecipe(...)) says them all"
        )
    recipe = recipes.pop() if recipes else None
    groups: defaultdict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, layer in layers.items():
        weight = layer._parameters.get("weight")
        if isinstance(weight, QuantizedWeight):
            groups[weight.description()].append(name)
    weights = [dict(zip(_CASTS, casts, strict=True)) | {"modules": names} for casts, names in groups.items()]
    data = None if recipe is None else json.loads(without_sharing(recipe).to_json())
    return StoredWeightsConfig(data, converted, weights)


def _require(names: list[str], files: Any) -> None:
    """Raise unless the checkpoint's ``files`` are safetensors files that have the tensors ``names``.

    What is missing would otherwise be filled with random numbers, and a warning.
    """
    from safetensors import SafetensorError, safe_open

    if not files or not all(str(file).endswith(".safetensors") for file in files):
        raise ValueError(f"weights that are stored as codes are read from safetensors files only, got {files!r:.80}")
    there: set[str] = set()
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                there.update(opened.keys())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is truncated or no safetensors file: {error}") from error
    if missing := [name for name in names if name not in there]:
        raise ValueError(f"{Path(files[0]).parent} lacks {missing[0]!r}, a part of a weight that is stored as codes")
