"""A training step written out by hand: the reference's casts, one product, and nothing else of fp4engine.

Whatever the engine does with plans, caches, saved records, launches and autograd has to come to these bytes. The
matrices are few and small, so that a case takes milliseconds.

Legend: M tokens, K in_features, N out_features; x [M, K], w [N, K], dy [M, N].
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4engine import reference
from fp4engine.constants import ALIGNMENT
from fp4engine.formats import CastSpec, Outer
from fp4engine.recipe import Recipe
from fp4engine.recipe.casts import Casts
from fp4engine.reference.cast import prepare
from fp4engine.reference.hadamard import rotate_back
from fp4engine.roles import QuantizerRole

ROLES = ("input", "weight", "grad_output")
Share = Callable[[Tensor], Tensor]
"""Makes of this rank's outer amax the group's."""


class Stream:
    """The random stream of one device: a seed, and how many draws have been taken."""

    def __init__(self, seed: int, rank: int = 0) -> None:
        self.seed, self.rank, self.taken = seed, rank, 0

    def draw(self) -> Tensor:
        self.taken += 1
        return torch.tensor([self.seed, self.taken])


class Side(NamedTuple):
    """One operand: the matrix itself where it is not cast, else what the cast made of it."""

    spec: CastSpec | None
    matrix: Tensor
    cast: reference.Cast | None = None

    def decoded(self) -> Tensor:
        """Values without the outer factor, FP32; with it, where it differs within a row."""
        if self.spec is None or self.cast is None:
            return self.matrix.float().contiguous()
        values = reference.decode(self.cast.codes, self.cast.scale_inv, self.spec)
        if self.spec.outer is Outer.BLOCK128:
            values = values * (self.cast.amax / torch.tensor(self.spec.numerator)).repeat_interleave(128, dim=1)
        return values

    def factor(self) -> tuple[Tensor, float]:
        """The outer amax and its numerator; ones where there is nothing left to multiply."""
        if self.spec is None or self.cast is None or self.spec.outer is Outer.BLOCK128:
            return torch.ones(1, dtype=torch.float32), 1.0
        return self.cast.amax, self.spec.numerator

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        if self.spec is None or self.cast is None:
            return self.matrix.to(dtype)
        return reference.dequantize(*self.cast, self.spec, self.matrix.shape[1], dtype)


def kept(tensor: Tensor) -> Tensor:
    """``tensor``, or the copy that backward keeps where kernels could not read it: MKL's sums depend on the address."""
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def side(
    matrix: Tensor,
    spec: CastSpec | None,
    role: str,
    columnwise: bool,
    rng: Tensor | None,
    rank: int = 0,
    share: Share | None = None,
) -> Side:
    """The operand ``matrix``, which is the transposed tensor where ``columnwise``."""
    if spec is None:
        return Side(None, kept(matrix.T).T if columnwise and role != "grad_output" else matrix)
    stream = ROLES.index(role) << 1 | columnwise | (0 if rng is None else rank << 8)
    values = matrix.clone(memory_format=torch.contiguous_format)
    amax = None
    if share is not None:
        amax = reference.amax(values, spec, rng, stream)
        if spec.outer is Outer.TENSOR or (spec.outer.is_by_rows and columnwise):  # whose rows all ranks have part of
            amax = share(amax)
    return Side(spec, values, reference.quantize(values, spec, amax=amax, rng=rng, stream=stream))


def product(left: Side, right: Side, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``round(alpha * left @ right.T + bias)``."""
    if left.spec is None and right.spec is None:
        return F.linear(left.matrix.to(dtype), right.matrix.to(dtype), None if bias is None else bias.to(dtype))
    a, b = left.decoded(), right.decoded()
    width = min(a.shape[1], b.shape[1])
    (left_amax, left_numerator), (right_amax, right_numerator) = left.factor(), right.factor()
    alpha = left_amax.view(-1, 1) * right_amax.view(1, -1) / torch.tensor(left_numerator * right_numerator)
    total = a[:, :width] @ b[:, :width].T * alpha.float()
    return (total if bias is None else total + bias.float()).to(dtype)


@dataclass
class Settings:
    """What all transformations of a step have in common.

    Attributes:
        amp: what ``torch.autocast`` casts inputs to, or None.
        share: see :data:`Share`; None outside process groups.
    """

    recipe: Recipe
    stream: Stream
    amp: torch.dtype | None = None
    share: Share | None = None

    def casts(self, role: str) -> Casts:
        return self.recipe.of(QuantizerRole("linear", role)).casts(role)

    def side(self, matrix: Tensor, spec: CastSpec | None, role: str, columnwise: bool, rng: Tensor | None) -> Side:
        return side(matrix, spec, role, columnwise, rng, self.stream.rank, self.share)


class Linear:
    """One pass through ``y = x w^T + b``.

    Args:
        needs: whether a backward pass will be asked for the gradients of x and of w.
        main_grad: what the gradient of w is added to, or None.
        weight_sides: operands of the weight that an earlier pass made, where they are cached.
    """

    def __init__(
        self,
        settings: Settings,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needs: tuple[bool, bool],
        main_grad: Tensor | None = None,
    ) -> None:
        self.settings, self.weight, self.bias, self.main_grad = settings, weight, bias, main_grad
        self.needs_dgrad, self.needs_wgrad = needs
        self.inp_dtype = x.dtype
        if settings.amp is not None and x.dtype != torch.float64:
            x = x.to(settings.amp)
        self.shape, self.x = x.shape, x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        self.override = settings.recipe.backward_override
        self.x_row, self.x_col = self._forward_sides(self.x, "input", self.needs_wgrad)
        self.w_row, self.w_col = self._forward_sides(weight, "weight", self.needs_dgrad)
        self.y = product(self.x_row, self.w_row, bias, x.dtype).view(*x.shape[:-1], weight.shape[0])

    def _forward_sides(self, matrix: Tensor, role: str, backward: bool) -> tuple[Side, Side | None]:
        casts = self.settings.casts(role)
        both = backward and self.override is None and casts.columnwise_source == "original"
        made = [casts.rowwise, casts.columnwise if both else None]
        rng = self.settings.stream.draw() if any(spec is not None and spec.is_stochastic for spec in made) else None
        rowwise = self.settings.side(matrix, casts.rowwise, role, False, rng)
        return rowwise, self.settings.side(matrix.T, casts.columnwise, role, True, rng) if both else None

    def backward(self, dy: Tensor) -> dict[str, Tensor | None]:
        """Gradients of x, w and b, where they are needed; that of w goes to ``main_grad`` if there is one."""
        settings, dtype = self.settings, self.x.dtype
        dy = dy if dy.ndim == 2 else dy.reshape(-1, dy.shape[-1])
        casts = settings.casts("grad_output")
        rng = self._backward_rng(casts) if self.needs_dgrad or self.needs_wgrad else None
        row_spec, col_spec = (casts.rowwise, casts.columnwise) if self.override is None else (None, None)
        grads: dict[str, Tensor | None] = {"x": None, "w": None, "b": None}
        if self.needs_dgrad:
            left = settings.side(dy, row_spec, "grad_output", False, rng)
            right = self._backward_side(self.weight, self.w_row, self.w_col, "weight", rng)
            right = right if right.spec is not None else Side(None, right.matrix.to(dtype))  # FP16 holds no 2^-127
            grad = self._gradient(left, right, self.x_row, "input", "weight", dtype)
            grads["x"] = grad.view(self.shape).to(self.inp_dtype)
        if self.needs_wgrad:
            left = settings.side(dy.T, col_spec, "grad_output", True, rng)
            right = self._backward_side(self.x, self.x_row, self.x_col, "input", rng)
            if self.main_grad is None:
                grads["w"] = self._gradient(left, right, self.w_row, "weight", "input", self.weight.dtype)
            else:
                added = self._gradient(left, right, self.w_row, "weight", "input", torch.float32)
                self.main_grad.copy_(self.main_grad.float() + added)
        if self.bias is not None and self.bias.requires_grad:
            grads["b"] = self._bias_gradient(dy, casts).to(self.bias.dtype)
        return grads

    def _gradient(self, left: Side, right: Side, own: Side, role: str, other: str, dtype: torch.dtype) -> Tensor:
        """``left @ right.T`` as gradient of ``role``: clipped, and rotated back if ``right`` is so rotated."""
        casts = self.settings.casts(other)
        made_of_rowwise = self.override == "dequantized" or (
            self.override is None and casts.columnwise_source == "rowwise_dequantized"
        )
        rotation = casts.rowwise.rotation if made_of_rowwise and casts.rowwise is not None else None
        clips = self.settings.casts(role).clipped_gradient and self.override is None
        if rotation is None and not clips:
            return product(left, right, None, dtype)
        grad = product(left, right, None, torch.float32)
        if clips:
            assert own.cast is not None and own.spec is not None
            values = prepare(own.matrix, own.spec, None, 0)
            scales, amax = own.cast.scale_inv.float(), own.cast.amax
            assert own.spec.outer in (Outer.TENSOR, Outer.NONE) and own.spec.block[0] == 1
            limit = scales.repeat_interleave(own.spec.block[1], 1) * own.spec.element.max_value
            limit = limit * (amax / torch.tensor(own.spec.numerator, dtype=torch.float32))
            width = min(grad.shape[1], values.shape[1])  # what one has more is padding
            grad = grad[:, :width] * ((values == 0) | (values.abs() < limit))[:, :width]
        if rotation is not None:
            grad = rotate_back(grad, rotation)
        return grad[:, : own.matrix.shape[1]].to(dtype).contiguous()  # an activation rounds by layout

    def _backward_rng(self, casts: Casts) -> Tensor | None:
        """One draw for everything in a backward pass, where any of it may need one."""
        sources = [self.settings.casts(role) for role in ROLES[:2]]
        every = [casts, *(source for source in sources if source.columnwise_source != "original")]
        specs = [spec for cast in every for spec in (cast.rowwise, cast.columnwise) if spec is not None]
        stochastic = self.override is None and any(spec.is_stochastic for spec in specs)
        return self.settings.stream.draw() if stochastic else None

    def _backward_side(self, tensor: Tensor, row: Side, col: Side | None, role: str, rng: Tensor | None) -> Side:
        if self.override == "high_precision":
            return Side(None, kept(tensor).to(self.x.dtype).T)
        if self.override == "dequantized":
            return Side(None, row.dequantized(self.x.dtype).T)
        if col is not None:
            return col
        casts = self.settings.casts(role)
        saved = casts.columnwise_source == "saved_original"
        spec, exact = casts.columnwise, torch.float32
        if spec is None and self.x.dtype == torch.bfloat16:
            exact = torch.bfloat16  # what is not cast again is multiplied in the activations' dtype
        values = tensor if saved else row.dequantized(exact)
        return self.settings.side(values.T, spec, role, True, rng if spec and spec.is_stochastic else None)

    def _bias_gradient(self, dy: Tensor, casts: Casts) -> Tensor:
        if dy.dtype == torch.float64:
            return dy.sum(0)
        if self.override is not None or (casts.rowwise is None and casts.columnwise is None):
            return dy.sum(0, dtype=torch.float32)
        return reference.column_sums(dy)


def differentiated(function: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """``function(*tensors)`` by PyTorch, and what turns the gradient of the result into those of ``tensors``."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        value = function(*leaves)
    return value.detach(), lambda grad: torch.autograd.grad(value, leaves, grad, retain_graph=True)


def norm(kind: str, eps: float, x: Tensor, gamma: Tensor, beta: Tensor | None) -> tuple[Tensor, Callable[..., Any]]:
    """PyTorch's norm, and its gradients with sums in FP32."""
    given = [x, gamma] if beta is None else [x, gamma, beta]

    def apply(x: Tensor, gamma: Tensor, beta: Tensor | None = None) -> Tensor:
        if kind == "LayerNorm":
            return F.layer_norm(x, gamma.shape, gamma, beta, eps)
        return F.rms_norm(x, gamma.shape, gamma, eps)

    value, gradients = differentiated(apply, *given)
    if kind == "LayerNorm" and x.dtype in (torch.bfloat16, torch.float16):
        _, wide = differentiated(apply, *(tensor.float() for tensor in given))
        return value, lambda grad: [part.to(x.dtype) for part in wide(grad.float())]
    return value, gradients
