"""An operand of fprop as the sum of two FP4 casts: the second is of what the first leaves."""

import torch
from torch import Tensor, nn

import fp4engine
from fp4engine.recipe import Recipe


def use(model: nn.Module, recipe: Recipe, role: str) -> None:
    """Add the second product to every quantized linear layer, ``x (W - Q(W))^T`` or ``(x - Q(x)) W^T``.

    Both products of fprop read FP4 operands and are rounded before they are added. dgrad and wgrad are the recipe's, as
    if the second product were not there.

    Args:
        role: the operand that has two terms, ``"weight"`` or ``"input"``.
    """
    for module in list(model.modules()):
        if isinstance(module, fp4engine.Linear):
            module.register_forward_hook(_Rest(module, recipe, role))


class _Rest:
    """Forward hook of one layer."""

    def __init__(self, module: fp4engine.Linear, recipe: Recipe, role: str) -> None:
        spec = recipe.casts(role).rowwise
        assert spec is not None, f"fprop casts no {role}"
        self.spec, self.role = spec, role
        factory = {"device": module.weight.device, "dtype": module.weight.dtype}
        self.layer = fp4engine.Linear(module.in_features, module.out_features, bias=False, **factory)
        self.layer.requires_grad_(requires_grad=False)

    def __call__(self, module: fp4engine.Linear, args: tuple[Tensor], output: Tensor) -> Tensor:
        with torch.no_grad():
            x, weight = args[0].to(output.dtype), module.weight.to(output.dtype)
            if self.role == "weight":
                weight = weight - fp4engine.cast(weight, self.spec)
            else:
                x = x - fp4engine.cast(x, self.spec)
            self.layer.weight.copy_(weight)
            rest = self.layer(x)
        return output + rest
