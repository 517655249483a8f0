"""A model converter for torchtitan: ``model_registry(flavor, converters=[NVFP4LinearConverter.Config()])``."""

from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.components.quantization import QuantizationConverter  # pyright: ignore[reportMissingImports]
from torchtitan.models.common.linear import Linear as TitanLinear  # pyright: ignore[reportMissingImports]
from torchtitan.models.common.moe import GroupedExperts  # pyright: ignore[reportMissingImports]
from torchtitan.protocols.module import Module, ModuleList  # pyright: ignore[reportMissingImports]

from fp4engine.modules import Gemms, Linear
from fp4engine.modules.borrowed import BorrowedGroupedLinear
from fp4engine.names import covers
from fp4engine.recipe import Recipe, zoo


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
                would then be the part's own.
        """
        if parallel_dims.cp > 1 or (parallel_dims.tp > 1 and parallel_dims.spmd_backend == "spmd_types"):
            raise NotImplementedError(
                f"{self.name}: context parallelism, and tensor parallelism by spmd_backend='spmd_types', hand over "
                "parts of tensors as plain tensors, which would not be cast as in one process; use data or pipeline "
                "parallelism, or tensor parallelism with parallelism.spmd_backend='full_dtensor' or 'partial_dtensor'"
            )
        super().parallelize(parallel_dims)


class _Gemms(Gemms, Module):
    """The products of one expert by one of its weights, by torchtitan's protocol."""


class _Products(BorrowedGroupedLinear, Module):
    """All experts' products by one of their weights, which stays a parameter of ``experts``."""

    def __init__(self, experts: torch.nn.Module, parameter: str, name: str, recipe: Recipe) -> None:
        super().__init__(experts, parameter, None, transposed=False)
        shape = (self.out_features, self.in_features)
        own = (_Gemms(name, recipe, module_type="grouped_linear", shape=shape) for _ in range(self.num_gemms))
        self.gemms = ModuleList(own)

    def keep_own(self) -> None:
        """Multiply by as many experts as this rank has."""
        self.num_gemms = len(self.weights)
        del self.gemms[self.num_gemms :]

    def _init_self_parameters(self) -> None:
        """Nothing, since the experts own all parameters."""

    @property
    def weights(self) -> list[Tensor]:
        stacked = getattr(self.owner, self.parameter)
        return list((stacked.to_local() if isinstance(stacked, DTensor) else stacked).unbind())


class NVFP4GroupedExperts(GroupedExperts):
    """torchtitan's experts, each of whose products has its own amaxes: the bytes of a loop over :class:`NVFP4Linear`.

    Parameters, initial values and checkpoints are torchtitan's. Operands are cast from the type that they have, where
    torchtitan rounds them to BF16.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """torchtitan's own fields, the recipe's name in the book, and the module's name in the model."""

        recipe: str = "nvfp4"
        name: str = ""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.name, recipe = config.name, zoo.make(config.recipe)
        for product, parameter in (("gate", "w1_EFD"), ("down", "w2_EDF"), ("up", "w3_EFD")):
            name = f"{config.name}.{parameter}".removeprefix(".")
            self.add_module(product, _Products(self, parameter, name, recipe))

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """[R, D] -> [R, D]; rows in the order of experts."""
        rows, counts = x_RD, num_tokens_per_expert_E
        hidden = F.silu(self.gate(rows, counts)) * self.up(rows, counts)
        return self.down(hidden, counts).type_as(rows)

    def parallelize(self, parallel_dims: Any) -> None:
        """As torchtitan parallelizes its experts.

        Raises:
            NotImplementedError: a rank would multiply parts of experts' weights, or parts of sequences.
        """
        if parallel_dims.cp > 1 or (parallel_dims.tp > 1 and parallel_dims.ep == 1):
            raise NotImplementedError(
                f"{self.name}: context parallelism, and tensor parallelism without expert parallelism, hand over parts "
                "of experts' tensors as plain tensors, which would not be cast as in one process; use data, pipeline "
                "or expert parallelism"
            )
        super().parallelize(parallel_dims)
        for product in (self.gate, self.down, self.up):
            product.keep_own()


class NVFP4LinearConverter(QuantizationConverter):
    """Builds :class:`NVFP4Linear` and :class:`NVFP4GroupedExperts` where a config has torchtitan's own of these.

    Raises:
        ValueError: an unknown recipe, one with delayed scaling, a pattern that covers nothing, or a subclass of
            ``Linear`` or ``GroupedExperts`` that no pattern covers: they are not converted.
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
        others = [f"{name} ({kind.__qualname__})" for name, kind in kinds if kind not in _CONVERTED]
        if others:
            raise ValueError(
                "only torchtitan's own Linear and GroupedExperts are converted; let keep_high_precision cover what is "
                f"to be left as it is: {', '.join(others)}"
            )
        for name, config, parent, attribute in found:
            given = {each.name: getattr(config, each.name) for each in fields(config)}
            converted = _CONVERTED[type(config)](**given, recipe=self.config.recipe, name=name)
            if parent is None:
                return converted
            if isinstance(parent, list):
                parent[attribute] = converted
            else:
                setattr(parent, attribute, converted)
        return model_config


_CONVERTED = {TitanLinear.Config: NVFP4Linear.Config, GroupedExperts.Config: NVFP4GroupedExperts.Config}
"""What is built where a config has exactly the former."""
