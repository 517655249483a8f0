"""Models whose weights are stored in FP4 from the start."""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from fp4engine.arguments import require_bool, shown
from fp4engine.modules.gemms import Gemms
from fp4engine.modules.quantized_weight import QuantizedWeight
from fp4engine.quantizers import Quantizer
from fp4engine.recipe import Recipe
from fp4engine.recipe.base import require_recipe
from fp4engine.state import get_default_recipe


@dataclass(frozen=True, eq=False)
class _ModelInit:
    """A :func:`quantized_model_init` region: its arguments."""

    enabled: bool
    recipe: Recipe
    preserve_high_precision_init_val: bool


_open: ContextVar[tuple[_ModelInit, ...]] = ContextVar("quantized_model_init", default=())
"""The innermost last. Generators may leave their regions in any order."""


def init_in_force() -> _ModelInit | None:
    """The region in which modules are built; None outside, and where it is disabled."""
    innermost = _open.get()[-1:]
    return innermost[0] if innermost and innermost[0].enabled else None


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Generator[None]:
    """Region in which modules are built with weights that are :class:`~fp4engine.QuantizedWeight`: codes and scales.

    There is no copy in high precision: forward and backward multiply the stored operands. Biases, norms and weights
    that ``recipe`` keeps in high precision stay plain, and so do the weights of modules that are not fp4engine's when
    they are built, even if :func:`~fp4engine.convert` converts them later.

    Args:
        enabled: False builds plain modules inside.
        recipe: what the weights are cast by, and what the model is to run by; None is :func:`get_default_recipe`. Under
            delayed scaling each weight is scaled by its own amax, whenever it is written to.
        preserve_high_precision_init_val: keep what each weight was quantized from on the CPU, for
            ``weight.get_high_precision_init_val()``, until ``weight.clear_high_precision_init_val()``.

    Raises:
        ValueError: ``recipe`` is not a recipe; ``enabled`` or ``preserve_high_precision_init_val`` is not a bool.
        NotImplementedError: when a module is built whose weight ``recipe`` gives a clipped gradient (``quartet``).

    Source: TransformerEngine ``pytorch/quantization.py``, ``quantized_model_init``.
    """
    if not isinstance(enabled, bool):  # a recipe in its place would be ignored
        raise ValueError(f"enabled must be True or False, got {shown(enabled)}; a recipe goes in recipe=")
    require_bool("preserve_high_precision_init_val", preserve_high_precision_init_val)
    recipe = get_default_recipe() if recipe is None else recipe
    require_recipe(recipe)
    region = _ModelInit(enabled, recipe, preserve_high_precision_init_val)
    _open.set((*_open.get(), region))
    try:
        yield
    finally:
        _open.set(tuple(other for other in _open.get() if other is not region))


def store_weight(module: torch.nn.Module, name: str, gemms: Gemms) -> None:
    """Inside a region, quantize the parameter ``name`` of ``module``, which ``gemms`` multiplies by."""
    init = init_in_force()
    if init is None:
        return
    weight = module.get_parameter(name)
    quantizer = gemms.plan_by(init.recipe).weight
    if quantizer.is_stateful:
        quantizer = Quantizer(quantizer.rowwise_spec, quantizer.columnwise_spec, stream=quantizer.stream)
    if quantizer.clipped_gradient:
        raise NotImplementedError(
            f"{init.recipe!r} gives a weight no gradient where its cast clipped it, which codes do not tell: such "
            "weights are trained in high precision, without quantized_model_init"
        )
    if quantizer.rowwise_spec is not None:
        stored = QuantizedWeight.from_values(weight, quantizer, init.preserve_high_precision_init_val)
        setattr(module, name, torch.nn.Parameter(stored, weight.requires_grad))


def refuse_parts(argument: str) -> None:
    """Refuse to build, inside a region, a weight that is put together from several parameters for each product.

    Raises:
        NotImplementedError: a region is in force; names ``argument``.
    """
    if init_in_force() is not None:
        raise NotImplementedError(f"a weight in parts cannot be stored as codes: quantized_model_init needs {argument}")
