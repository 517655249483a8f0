"""Products of two tensors, plain or quantized, by TransformerEngine's arguments.

Legend: A and B as given, [rows, cols]; the result is ``op(B) @ op(A)``, where a layout ``"TN"`` transposes A alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp4engine import ops
from fp4engine.arguments import require_one_of
from fp4engine.modules.te_arguments import refuse
from fp4engine.te.pytorch.base_storage import QuantizedTensorStorage
from fp4engine.te.pytorch.quantized_tensor import Quantizer, decoded
from fp4engine.tensor import Operand

__all__ = ["general_gemm", "general_grouped_gemm"]


def general_gemm(
    A: Any,
    B: Any,
    out_dtype: torch.dtype | None = None,
    quantization_params: Quantizer | None = None,
    gelu: bool = False,
    gelu_in: Tensor | None = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Tensor | None = None,
    bias: Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    ub: Any = None,
    ub_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
) -> tuple[Any, Tensor | None, None, None]:
    """The product, the gradient of a bias with ``grad``, and None for GELU's input and an overlapped output.

    Args:
        A, B: the weight and the input of fprop (``"TN"``), the weight and the gradient of dgrad (``"NN"``), the input
            and the gradient of wgrad (``"NT"``). Of a quantized tensor the side is read that lies along the product.
        out_dtype: dtype of the result; None takes the dtype of ``out``, or else of ``A``.
        quantization_params: the quantizer of the result, which writes into ``out`` if that is given.
        accumulate: add to ``out``, with one rounding.
        bias: added to each row; with ``grad`` its gradient, the sum of the rows of B, is returned instead.
        use_split_accumulator: False lets FP8 tensor cores keep sums in their shorter accumulator.

    Raises:
        NotImplementedError: GELU, factors, or communication that overlaps.
        ValueError: a quantized tensor has not the side that the product reads; ``out`` or ``bias`` is of another shape,
            or ``out`` is plain and ``quantization_params`` are given.
    """
    factor = 1.0 if accumulate else 0.0
    refuse(
        "general_gemm",
        gelu=(gelu, False),
        gelu_in=(gelu_in, None),
        alpha=(alpha, 1.0),
        beta=(factor if beta is None else beta, factor),
        ub=(ub, None),
        ub_type=(ub_type, None),
        extra_output=(extra_output, None),
        bulk_overlap=(bulk_overlap, False),
    )
    require_one_of("general_gemm(layout=)", layout, ("TN", "NN", "NT"))
    if accumulate and (out is None or isinstance(out, QuantizedTensorStorage)):
        got = "None" if out is None else f"a {type(out).__name__}"
        raise ValueError(f"general_gemm(accumulate=True) needs out, the plain tensor to add to, got {got}")
    transposes_a, transposes_b = (letter == "T" for letter in layout)
    left = _operand("B", B, is_transposed=transposes_b)
    right = _operand("A", A, is_transposed=not transposes_a)
    nominal = A._dtype if isinstance(A, QuantizedTensorStorage) else A.dtype
    dtype = out_dtype or (nominal if out is None else out.dtype)
    bias_grad = None
    shape = [left.rows, right.rows] if transposes_b else [*B.shape[:-1], right.rows]
    if out is not None and (out.numel() != left.rows * right.rows or out.shape[-1:] != (right.rows,)):
        raise ValueError(f"out must have shape {shape}, got {list(out.shape)}")
    if out is not None and quantization_params is not None:
        quantization_params.require_target(out, out)
    if bias is not None and bias.numel() != (B.shape[-1] if grad else right.rows):
        raise ValueError(f"bias must have {B.shape[-1] if grad else right.rows} elements, got {list(bias.shape)}")
    if grad and bias is not None:
        bias_grad = decoded(B).reshape(-1, B.shape[-1]).sum(0, dtype=torch.float32).to(bias.dtype)
        bias = None
    with torch.no_grad():
        product = ops.gemm(
            left,
            right,
            out_dtype=dtype if out is None else out.dtype,
            bias=bias,
            out=out.view(-1, out.shape[-1]) if accumulate and out is not None else None,
            fast_accumulation=not use_split_accumulator,
        )
        result = product.view(shape if out is None else out.shape)
        if quantization_params is not None:
            result = quantization_params.quantize(result, out=out)
        elif out is not None:
            result = out if accumulate else out.copy_(result)
        return result, bias_grad, None, None


def general_grouped_gemm(
    A: Sequence[Any],
    B: Sequence[Any],
    out: list[Tensor],
    quantization_params: Sequence[Quantizer | None],
    out_dtype: torch.dtype,
    layout: str = "TN",
    m_splits: Sequence[int] | None = None,
    gelu: bool = False,
    grad: bool = False,
    accumulate: bool = False,
    bias: Sequence[Tensor | None] | None = None,
    use_bias: bool = False,
    use_split_accumulator: bool = False,
    D_dtype: Any = None,
    single_output: bool = False,
) -> tuple[Any, list[Tensor | None], list[None]]:
    """:func:`general_gemm` of each pair, into ``out``.

    Args:
        m_splits: rows of each result in ``out[0]``, if ``single_output``.

    Raises:
        ValueError: ``single_output`` without ``m_splits``, with too few of them, or with rows that ``out[0]`` does not
            have; or not as many results as pairs.
    """
    places: Sequence[Tensor] = out
    if single_output:
        if m_splits is None or len(m_splits) != len(A) or sum(m_splits) != out[0].shape[0]:
            raise ValueError(
                f"general_grouped_gemm(single_output=True) needs m_splits, the rows of each of {len(A)} results, "
                f"{out[0].shape[0]} in all; got {None if m_splits is None else list(m_splits)}"
            )
        places = out[0].split(list(m_splits))
    biases = bias if use_bias and bias is not None else [None] * len(A)
    given = {"A": A, "B": B, "out": places, "quantization_params": quantization_params, "bias": biases}
    counts = {name: len(each) for name, each in given.items()}
    if len(set(counts.values())) != 1:
        raise ValueError(f"A, B, results, quantizers and biases must be equally many, got {counts}")
    grads: list[Tensor | None] = []
    for left, right, place, quantizer, bias_of_one in zip(*given.values(), strict=True):
        _, bias_grad, *_ = general_gemm(
            left,
            right,
            out_dtype,
            quantizer,
            gelu,
            accumulate=accumulate,
            layout=layout,
            out=place,
            bias=bias_of_one,
            use_split_accumulator=use_split_accumulator,
            grad=grad,
        )
        grads.append(bias_grad)
    return out[0] if single_output else out, grads, [None] * len(A)


def _operand(name: str, tensor: Any, *, is_transposed: bool) -> Operand:
    """``tensor``, or its transpose, as the operand of a product that contracts its last axis.

    Raises:
        ValueError: it is quantized, and that side of it is not there.
    """
    if not isinstance(tensor, QuantizedTensorStorage):
        matrix = tensor.detach().reshape(-1, tensor.shape[-1])
        return Operand.dense(matrix.T.contiguous() if is_transposed else matrix)
    side = "columnwise" if is_transposed else "rowwise"
    found: Operand | None = getattr(tensor.operands, side)
    if found is not None:
        return found
    other = tensor.operands.columnwise or tensor.operands.rowwise
    if other is not None and other.spec is None:
        return Operand.dense(other.data.T.contiguous())
    raise ValueError(f"general_gemm reads the {side} side of {name}, which {tensor!r} does not have")
