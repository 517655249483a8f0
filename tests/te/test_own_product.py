"""Quantizers written in Python that multiply what they make."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from fp4engine.te.common.recipe import CustomRecipe
from fp4engine.te.pytorch import IdentityQuantizer, LayerNormLinear, Linear, Quantizer, autocast
from fp4engine.te.pytorch.custom_recipes.gemm import GEMMType


@dataclass
class Halves:
    """A matrix in half precision, both ways round."""

    data: torch.Tensor | None
    data_t: torch.Tensor | None
    _quantizer: "InHalf"

    @property
    def scale(self):
        return torch.ones(1)

    scale_t = scale


class InHalf(Quantizer):
    custom = True
    products: ClassVar[list[GEMMType]] = []

    def quantize(self, tensor, **_):
        row = tensor.half() if self.rowwise_usage else None
        return Halves(row, tensor.T.half() if self.columnwise_usage else None, self)

    def qgemm(self, qx, qw, m_params, out_dtype, sx, sw, bias=None, gemm_type=None, **_):
        self.products.append(gemm_type)
        return (qx.float() @ qw.float().T).to(out_dtype)


@pytest.mark.parametrize("kind", [Linear, LayerNormLinear])
def test_a_module_computes_by_the_quantizers_own_product(kind) -> None:
    torch.manual_seed(0)
    layer, x = kind(24, 40), torch.randn(3, 5, 24, requires_grad=True)
    InHalf.products.clear()
    with autocast(recipe=CustomRecipe(qfactory=lambda role: InHalf())):
        y = layer(x)
    y.square().sum().backward()
    assert InHalf.products == [GEMMType.FPROP, GEMMType.DGRAD, GEMMType.WGRAD]
    mine = y.detach(), x.grad.clone(), layer.weight.grad.clone(), layer.bias.grad.clone()
    x.grad = None
    layer.zero_grad()
    y = layer(x)
    y.square().sum().backward()
    for got, expected in zip(mine, (y, x.grad, layer.weight.grad, layer.bias.grad), strict=True):
        torch.testing.assert_close(got, expected, rtol=4e-3, atol=4e-3)


def test_frozen_weights_and_inputs_without_gradients_need_no_columnwise_side() -> None:
    layer = Linear(16, 16)
    layer.weight.requires_grad_(False)
    x = torch.randn(4, 16, requires_grad=True)
    InHalf.products.clear()
    with autocast(recipe=CustomRecipe(qfactory=lambda role: InHalf())):
        layer(x).sum().backward()
    assert InHalf.products == [GEMMType.FPROP, GEMMType.DGRAD] and layer.weight.grad is None


def test_what_cannot_be_is_refused() -> None:
    x = torch.randn(16, 16)

    def mixed(role):
        return InHalf() if role is not None and role.tensor_type == "weight" else IdentityQuantizer()

    with pytest.raises(ValueError, match="all have a qgemm"), autocast(recipe=CustomRecipe(qfactory=mixed)):
        Linear(16, 16)(x)
    inp = x.clone().requires_grad_()
    with autocast(recipe=CustomRecipe(qfactory=lambda role: InHalf())):
        y = Linear(16, 16)(inp)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(y.sum(), inp, create_graph=True)
    layer = Linear(16, 16, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(16, 16)
    recipe = CustomRecipe(qfactory=lambda role: InHalf())
    with pytest.raises(NotImplementedError, match="fuse_wgrad_accumulation"), autocast(recipe=recipe):
        layer(x)
