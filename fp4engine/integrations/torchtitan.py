"""A model converter for torchtitan: ``model_registry(flavor, converters=[NVFP4LinearConverter.Config()])``."""

from dataclasses import dataclass, field
from typing import Any

from torchtitan.components.quantization import QuantizationConverter  # pyright: ignore[reportMissingImports]
from torchtitan.models.common.linear import Linear as TitanLinear  # pyright: ignore[reportMissingImports]
from torchtitan.models.common.moe import GroupedExperts  # pyright: ignore[reportMissingImports]
from torchtitan.protocols.module import Module  # pyright: ignore[reportMissingImports]

from fp4engine.modules import Linear
from fp4engine.names import covers
from fp4engine.recipe import zoo


class NVFP4Linear(Linear, Module):
    """:class:`fp4engine.Linear` by torchtitan's protocol: parameters, initial values and checkpoints of its own one."""

    @dataclass(kw_only=True, slots=True)
    class Config(TitanLinear.Config):
        """What builds it: torchtitan's own fields, the recipe's name in the book, and the layer's name in the model."""

        recipe: str = "nvfp4"
        name: str = ""

    def __init__(self, config: Any) -> None:
        sizes = (config.in_features, config.out_features, config.bias)
        super().__init__(*sizes, name=config.name, recipe=zoo.make(config.recipe))

    def parallelize(self, parallel_dims: Any) -> None:
        """As torchtitan parallelizes its linear layers.

        Raises:
            NotImplementedError: it would hand over a part of a tensor as a plain tensor, whose amaxes and random bits
                would be those of the part.
        """
        if parallel_dims.cp > 1 or (parallel_dims.tp > 1 and parallel_dims.spmd_backend == "spmd_types"):
            raise NotImplementedError(
                f"{self.name}: context parallelism, and tensor parallelism by spmd_backend='spmd_types', hand over "
                "parts of tensors as plain tensors, which would not be cast as in one process; use data or pipeline "
                "parallelism, or tensor parallelism with parallelism.spmd_backend='full_dtensor' or 'partial_dtensor'"
            )
        super().parallelize(parallel_dims)


class NVFP4LinearConverter(QuantizationConverter):
    """Builds :class:`NVFP4Linear` where a model's config has torchtitan's ``Linear``.

    Raises:
        ValueError: an unknown recipe, one with delayed scaling, a pattern that covers nothing, or experts
            (``GroupedExperts``) or a subclass of ``Linear`` that no pattern covers: they are not converted.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """``recipe`` is a name of the recipe book; ``keep_high_precision`` as in :func:`fp4engine.convert`."""

        recipe: str = "nvfp4"
        keep_high_precision: list[str] = field(default_factory=lambda: ["lm_head"])

    def __init__(self, config: Any) -> None:
        if zoo.make(config.recipe).is_delayed:
            raise ValueError(f"{config.recipe} scales by earlier steps, which needs autocast regions around each")
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """``model_config`` with converted linear layers."""
        patterns = self.config.keep_high_precision
        found = [node for kind in (TitanLinear, GroupedExperts) for node in model_config.traverse(kind.Config)]
        unused = [pattern for pattern in patterns if not any(covers(pattern, name) for name, *_ in found)]
        if unused:
            raise ValueError(
                f"keep_high_precision: {', '.join(unused)} covers none of {len(found)} linear layers and experts"
            )
        found = [node for node in found if not any(covers(pattern, node[0]) for pattern in patterns)]
        kinds = ((name, type(config)) for name, config, *_ in found)
        others = [f"{name} ({kind.__qualname__})" for name, kind in kinds if kind is not TitanLinear.Config]
        if others:
            raise ValueError(
                "only torchtitan's own Linear is converted; let keep_high_precision cover what is to be left as it is: "
                + ", ".join(others)
            )
        for name, config, parent, attribute in found:
            sizes = {key: getattr(config, key) for key in ("in_features", "out_features", "bias")}
            given = {key: getattr(config, key) for key in ("param_init", "sharding_config")}
            converted = NVFP4Linear.Config(**sizes, **given, recipe=self.config.recipe, name=name)
            if parent is None:
                return converted
            if isinstance(parent, list):
                parent[attribute] = converted
            else:
                setattr(parent, attribute, converted)
        return model_config
