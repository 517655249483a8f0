"""y = x W^T + b, with each of its three GEMMs on quantized operands.

    fprop  y[M, N]  = x[M, K]  . w[N, K]     contracts K    rowwise    x rowwise
    dgrad  dx[M, K] = dy[M, N] . w^T[K, N]   contracts N    rowwise    x columnwise
    wgrad  dw[N, K] = dy^T[N, M] . x^T[K, M] contracts M    columnwise x columnwise

Legend: M tokens, K in_features, N out_features.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fp4engine import ops
from fp4engine.functional.activation import Activation
from fp4engine.functional.fused_input import FusedInput
from fp4engine.functional.norm import Norm
from fp4engine.functional.plan import ExecutedGemms, GemmName, LinearPlan
from fp4engine.functional.saved import flatten, unflatten
from fp4engine.functional.shards import Part, Shards, Wholes, names_of, quantize_parts, share_of
from fp4engine.functional.through_cast import gradient, rotation_of, within
from fp4engine.functional.weight_cache import Make, Operands, WeightCache
from fp4engine.ops import Operand, TiledOperand
from fp4engine.quantizers import Quantizer
from fp4engine.quantizers.base import as_matrix
from fp4engine.tensor import QuantizedTensor


class Call(NamedTuple):
    """What one forward and its backward are told beside their tensors.

    Attributes:
        plan: how to compute.
        executed: where to count GEMMs.
        shards: what this rank has of the matrices, where several ranks share them; else None.
        stored: finds the weight's operands, or makes and keeps them, by :data:`Make`; None quantizes anew.
        tiles: what the weight is, if it came as codes with a scale of each tile; else None.
        main_grad: where the weight's gradient goes instead of ``weight.grad``, or None.
        needs_dgrad, needs_wgrad: which gradients a backward pass will be asked for.
        function: the norm or activation that the input still has to go through, or None.
        dtype: of the function's value.
    """

    plan: LinearPlan
    executed: ExecutedGemms
    shards: Shards | None
    stored: Callable[[LinearPlan, bool, Make], Operands] | None
    main_grad: "MainGrad | None"
    needs_dgrad: bool
    needs_wgrad: bool
    function: Norm | Activation | None
    dtype: torch.dtype
    tiles: TiledOperand | None = None

    def record(self, flops: int, *names: GemmName) -> None:
        """Count GEMMs that ran, each of so many FLOPs."""
        self.executed.record(self.plan.formats, flops, *names)


class Saved(NamedTuple):
    """What a forward keeps for its backward: only what the needed GEMMs read.

    Attributes:
        inp: for wgrad: the columnwise operand, or what it is made of.
        weight: for dgrad: likewise.
        x, parameters, statistics: of the input's function.
        inp_within, weight_within: where the cast did not saturate, see :mod:`fp4engine.functional.through_cast`.
    """

    inp: Operand | None
    weight: Operand | TiledOperand | None
    x: Tensor | None = None
    parameters: tuple[Tensor | None, ...] = ()
    statistics: Tensor | None = None
    inp_within: Tensor | None = None
    weight_within: Tensor | None = None


class MainGrad:
    """A buffer that the weight's gradient is added to, in FP32 before the one rounding, by wgrad's epilogue.

    The product runs in the autograd node of the weight (:class:`Accumulate`), which PyTorch runs only if the weight's
    gradient is asked for; the linear transformation's node leaves the product here.
    """

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.product: Callable[[], Any] | None = None


class Accumulate(torch.autograd.Function):
    """The weight itself; in the backward pass, wgrad into ``weight.main_grad`` and no gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, main_grad: MainGrad) -> Tensor:
        ctx.main_grad, ctx.weight = main_grad, weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, None]:
        main_grad: MainGrad = ctx.main_grad
        product, main_grad.product = main_grad.product, None
        assert product is not None, "the linear transformation's backward comes first"
        product()
        if hasattr(ctx.weight, "grad_added_to_main_grad"):  # who looks at it has put it there
            ctx.weight.grad_added_to_main_grad = True
        return None, None


def linear(
    inp: Tensor | FusedInput,
    weight: Tensor,
    bias: Tensor | None,
    plan: LinearPlan,
    *,
    executed: ExecutedGemms | None = None,
    shards: Shards | None = None,
    weight_cache: WeightCache | None = None,
    main_grad: Tensor | None = None,
    wholes: Wholes | None = None,
) -> Tensor:
    """Linear transformation by ``plan``, differentiable once.

    Args:
        inp: [..., K], any rank >= 1, stride and number of rows; or a function that :meth:`FusedInput.fuses`.
        weight: [N, K]; bias: [N] or None.
        executed, shards: see :class:`Call`.
        weight_cache: where to look for the weight's operands, and to leave them; None quantizes anew.
        main_grad: FP32, BF16 or FP16 [N, K] to which wgrad adds; the weight then gets no gradient of its own.
        wholes: what ``inp``, ``weight`` and ``bias`` are, if not plain tensors; the output is then whole as well.

    Returns:
        [..., N] in ``inp.dtype``.

    Raises:
        ValueError: the last dimension of ``inp`` is not K.
    """
    require_features(inp, weight)
    function, x, parameters, dtype = (None, inp, (), inp.dtype) if isinstance(inp, Tensor) else inp
    needs_dgrad = needs_wgrad = False
    # The first run of a reentrant checkpoint has no gradients, and draws what the second will.
    if torch.is_grad_enabled() or (plan.draws_in_forward and ops.is_replaying()):
        needs_dgrad = x.requires_grad or any(t is not None and t.requires_grad for t in parameters)
        needs_wgrad = weight.requires_grad
    box = None if main_grad is None else MainGrad(main_grad)
    executed = ExecutedGemms() if executed is None else executed
    stored = tiles = None
    if weight_cache is not None:
        stored, tiles = partial(weight_cache.get, weight), weight_cache.tiles(weight)
    call = Call(plan, executed, shards, stored, box, needs_dgrad, needs_wgrad, function, dtype, tiles)
    if box is not None:
        weight = Accumulate.apply(weight, box)
    if wholes is not None:
        return PartFunction.apply(x, weight, bias, call, wholes)
    return LinearFunction.apply(x, weight, bias, call, *parameters)


def require_features(inp: Tensor | FusedInput, weight: Tensor) -> None:
    """Raise a ValueError unless ``inp`` is [..., K] for a weight [N, K]."""
    shape = inp.shape
    if len(shape) == 0 or shape[-1] != weight.shape[1]:
        raise ValueError(
            f"inp must have shape [..., in_features={weight.shape[1]}], got {tuple(shape)} "
            f"for weight {tuple(weight.shape)}"
        )


def linear_fprop(inp: Operand, weight: Operand, bias: Tensor | None, call: Call, dtype: torch.dtype) -> Tensor:
    """``y[M, N] = x[M, K] @ w[N, K].T + b``."""
    return _gemm("fprop", inp, weight, call, dtype, bias)


def linear_dgrad(grad_output: Operand, weight: Operand, call: Call, dtype: torch.dtype) -> Tensor:
    """``dx[M, K] = dy[M, N] @ w[N, K]``: grad_output rowwise, weight columnwise."""
    return _gemm("dgrad", grad_output, weight, call, dtype)


def linear_wgrad(
    grad_output: Operand, inp: Operand, call: Call, dtype: torch.dtype, main_grad: Tensor | None = None
) -> Tensor:
    """``dw[N, K] = dy[M, N].T @ x[M, K]``: both operands columnwise; in ``dtype``, or added to ``main_grad``."""
    return _gemm("wgrad", grad_output, inp, call, dtype, out=main_grad)


def linear_bgrad(grad_output: Tensor, plan: LinearPlan, dtype: torch.dtype) -> Tensor:
    """``db[N] = sum of dy[M, N] over M``, in FP32 and in the order of :func:`fp4engine.reference.column_sums`.

    Where the gradient is not quantized, it is summed as ``nn.Linear`` would.
    """
    if plan.grad_output.is_identity or plan.backward_override is not None:
        accumulation = torch.float64 if grad_output.dtype == torch.float64 else torch.float32
        return grad_output.sum(0, dtype=accumulation).to(dtype)
    return ops.bias_gradient(grad_output, dtype, plan.backend)


def _gemm(
    name: GemmName,
    left: Operand,
    right: Operand,
    call: Call,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    plan = call.plan
    call.record(2 * left.rows * right.rows * left.cols, name)
    fast = name in plan.fast_accumulation
    return ops.gemm(left, right, out_dtype=dtype, bias=bias, out=out, backend=plan.backend, fast_accumulation=fast)


class LinearFunction(torch.autograd.Function):
    """Autograd around the three GEMMs. Saves plain tensors, and only those that the needed GEMMs read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call, *parameters: Any) -> Tensor:
        ctx.call, ctx.inp_shape, ctx.weight_dtype = call, x.shape, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        matrix = as_matrix(x)
        ctx.at_once = way = _at_once(matrix, weight, call)
        if way is None:
            output, saved = _forward_by_operations(x, weight, bias, call, parameters)
            tensors, ctx.structure = flatten(saved)
        else:
            output, tensors = _forward_at_once(way, matrix, weight, bias, call)
            call.record(2 * x.numel() * weight.shape[0], "fprop")
        ctx.save_for_backward(*tensors)
        if x.ndim != 2:  # as nn.Linear reshapes: autograd forbids to change a view that a Function returns in place
            output = torch.ops.aten._unsafe_view(output, (*x.shape[:-1], weight.shape[0]))
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        call: Call = ctx.call
        plan, function = call.plan, call.function
        needs_dgrad, needs_wgrad, needs_bias = call.needs_dgrad, call.needs_wgrad, ctx.needs_input_grad[2]
        grad_output = as_matrix(grad_outputs[0])
        grad_input = grad_weight = grad_bias = None
        grad_parameters: tuple[Tensor | None, ...] = (None,) * (len(ctx.needs_input_grad) - 4)
        if needs_dgrad or needs_wgrad:
            if ctx.at_once is not None:
                dtypes, bias_dtype = (call.dtype, ctx.weight_dtype), ctx.bias_dtype if needs_bias else None
                asked = (ctx.at_once, grad_output, ctx.saved_tensors, ctx.inp_shape[-1], dtypes, bias_dtype, call)
                grad_input, grad_weight, grad_bias = _backward_at_once(*asked)
                names = ("dgrad", "wgrad")[not needs_dgrad : 1 + needs_wgrad]
                call.record(2 * grad_output.numel() * ctx.inp_shape[-1], *names)
            else:
                saved = unflatten(Saved, ctx.structure, ctx.saved_tensors)
                asked = (grad_output, saved, call, _draw(call, grad_output.device), ctx.inp_shape[-1], ctx.weight_dtype)
                grad_input, grad_weight = _gradients(*asked)
                if function is not None and grad_input is not None:
                    assert saved.x is not None
                    gradients = function.gradients(grad_input, as_matrix(saved.x), saved.parameters, saved.statistics)
                    grad_input, grad_parameters = gradients[0], gradients[1:]
            if grad_input is not None and len(ctx.inp_shape) != 2:
                grad_input = grad_input.view(ctx.inp_shape)
        if needs_bias and grad_bias is None:
            grad_bias = linear_bgrad(grad_output, plan, ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias, None, *grad_parameters


class PartFunction(torch.autograd.Function):
    """:class:`LinearFunction` on a rank's parts of whole tensors: one node for what is else one for each tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call, wholes: Wholes) -> Tensor:
        ctx.wholes = wholes
        part = wholes.part
        return wholes.output(
            LinearFunction.forward(ctx, part(x), part(weight), bias if bias is None else part(bias), call)
        )

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        wholes: Wholes = ctx.wholes
        gradients = LinearFunction.backward(ctx, wholes.part_of_grad(grad_outputs[0]))
        return *wholes.gradients(*gradients[:3]), None, None


def _forward_by_operations(
    x: Tensor, weight: Tensor, bias: Tensor | None, call: Call, parameters: tuple[Any, ...]
) -> tuple[Tensor, Saved]:
    """The output as a matrix, and what backward needs; one operation after the other."""
    plan, function = call.plan, call.function
    statistics = inp_within = weight_within = None
    if function is None:
        (inp, inp_kept), (rowwise, weight_kept) = forward_operands(x, weight, call)
    else:
        source, statistics = function.source(as_matrix(x), call.dtype, *parameters)
        inp, inp_kept = quantize_source(source, plan.input, call, call.needs_wgrad)
        rowwise, weight_kept = weight_operands(weight, call)
    if call.needs_dgrad:
        inp_within = within(x, inp, plan.input, plan)
    if call.needs_wgrad:
        weight_within = within(weight, rowwise, plan.weight, plan)
    added = bias if call.shards is None or call.shards.adds_bias else None
    output = linear_fprop(inp, rowwise, added, call, call.dtype)
    assert not isinstance(inp_kept, TiledOperand), "an input is cast here"
    saved = Saved(inp_kept, weight_kept, inp_within=inp_within, weight_within=weight_within)
    if function is not None and call.needs_dgrad:
        saved = saved._replace(x=x, parameters=parameters, statistics=statistics)
    return output, saved


Way = ops.LinearAtOnce | ops.LinearByOperators
Shared = ops.LinearByValues | ops.LinearByOperators


def _forward_at_once(way: Way, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> tuple[Tensor, ops.Kept]:
    """The output, and what backward needs, of a matrix ``x``."""
    plan, needs = call.plan, (call.needs_dgrad, call.needs_wgrad)
    if call.shards is not None:
        assert isinstance(way, Shared), "other ways share no amaxes"
        return _forward_share(way, x, weight, bias, needs, call.shards)
    memories = None
    if plan.is_stateful:
        memories = plan.input.recall(x.device), plan.weight.recall(x.device)
    return way.forward(x, weight if call.tiles is None else call.tiles, bias, *needs, memories)


def _backward_at_once(
    way: Way,
    grad_output: Tensor,
    kept: ops.Kept,
    ins: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    bias_dtype: torch.dtype | None,
    call: Call,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias; the last only where the way computes it."""
    device, is_tiled = grad_output.device, call.tiles is not None
    if call.shards is None and isinstance(way, ops.LinearByValues):
        state = ops.live_state(device) if call.plan.draws_in_backward else None
        rng = _draw(call, device) if state is None else state
        is_live = state is not None
        return *way.backward(grad_output, kept, ins, rng, dtypes, is_tiled=is_tiled, is_live=is_live), None
    asked = (grad_output, kept, ins, _draw(call, device), dtypes)
    if call.shards is not None:
        assert isinstance(way, Shared), "other ways share no amaxes"
        return _backward_share(way, *asked, bias_dtype, call.shards)
    if isinstance(way, ops.LinearByOperators):
        return way.backward(*asked, bias_dtype, is_tiled=is_tiled)
    assert not is_tiled, "what comes as tiles is FP4"
    memory = call.plan.grad_output.recall(device) if call.plan.is_stateful else None
    return *way.backward(*asked, memory), None


def _draw(call: Call, device: torch.device) -> Tensor | None:
    """The draw of a backward pass, if it takes one."""
    if not call.plan.draws_in_backward:
        return None
    if call.shards is not None:
        return call.shards.draw(device, "backward")
    return ops.next_draw(device, direction="backward")


def _forward_share(
    way: Shared, x: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, bool], shards: Shards
) -> tuple[Tensor, ops.Kept]:
    """One rank's part of a forward: amaxes, a collective, and the rest."""
    travel = shards.travelling()
    assert travel is not None, "a layer goes this way only if all amaxes of a direction travel together"
    added = bias if shards.adds_bias else None
    if isinstance(way, ops.LinearByOperators):
        told = travel.shared, names_of(travel.forward), shards.weight_amaxes
        return way.forward(x, weight, added, *needs, None, *told)
    return way.forward(x, weight, added, *needs, None, share_of(*travel[:2], shards.weight_amaxes))


def _backward_share(
    way: Shared,
    grad_output: Tensor,
    kept: ops.Kept,
    ins: int,
    rng: Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    bias_dtype: torch.dtype | None,
    shards: Shards,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """One rank's part of a backward, likewise; the gradient of a bias only from operators."""
    travel, rank, place = shards.travelling(), shards.rank, shards.grad_output.place
    assert travel is not None, "a layer goes this way only if all amaxes of a direction travel together"
    if isinstance(way, ops.LinearByOperators):
        place = None if rng is None else place
        return way.backward(grad_output, kept, ins, rng, dtypes, bias_dtype, place, rank, names_of(travel.backward))
    rng = rng if rng is None or place is None else ops.placed(rng, *place)
    share = share_of((True, True), travel.backward)
    return *way.backward(grad_output, kept, ins, rng, dtypes, None, rank, share), None


def _at_once(x: Tensor, weight: Tensor, call: Call) -> ops.LinearAtOnce | ops.LinearByOperators | None:
    """What computes forward and backward with few launches; None if something is kept or added to, or goes two ways.

    In a compiled graph these are two operators, unless what delayed scaling remembers is to be written, or the weight
    is large: single operators leave more to the compiler, which then casts the input of several layers once.
    """
    plan, tiles = call.plan, call.tiles
    alone = call.function is None and (call.stored is None or tiles is not None) and call.main_grad is None
    if plan.casts is None or not alone:
        return None
    if call.shards is not None and not _goes_at_once(call.shards, plan.casts, tiles):
        return None
    if not torch.compiler.is_dynamo_compiling():
        found = ops.linear_at_once(plan.casts, x, weight, tiles)
        return found if call.shards is None or isinstance(found, ops.LinearByValues) else None
    is_taken = tiles is not None or type(weight) in (Tensor, torch.nn.Parameter)
    if plan.is_stateful or not is_taken or not ops.is_bound_by_host(weight):
        return None
    return ops.LinearByOperators(ops.key_of(plan.casts), weight.dtype)


def _goes_at_once(shards: Shards, casts: ops.Casts, tiles: TiledOperand | None) -> bool:
    """Whether the parts that ranks have can be cast with few launches."""
    return tiles is None and ops.can_share(casts) and shards.travelling() is not None


def _gradients(
    grad_output: Tensor, saved: Saved, call: Call, rng: Tensor | None, in_features: int, weight_dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the input and of the weight, one operation after the other."""
    grad_input, grad_weight, backend = None, None, call.plan.backend
    left, left_t = quantize_grad(grad_output, call, rng)
    weight, inp = saved_operands(saved.weight, saved.inp, call, rng)
    if call.needs_dgrad:
        assert left is not None and weight is not None
        rotation = rotation_of(call.plan.weight, call.plan)
        dgrad = partial(linear_dgrad, left, weight, call)
        grad_input = gradient(dgrad, rotation, saved.inp_within, in_features, call.dtype, backend)
    if call.needs_wgrad:
        assert left_t is not None and inp is not None
        rotation = rotation_of(call.plan.input, call.plan)
        wgrad = partial(linear_wgrad, left_t, inp, call)
        undone = partial(gradient, wgrad, rotation, saved.weight_within, in_features, backend=backend)
        if call.main_grad is None:
            grad_weight = undone(weight_dtype)
        else:
            buffer = call.main_grad.buffer
            if rotation is None and saved.weight_within is None:
                call.main_grad.product = partial(wgrad, buffer.dtype, buffer)
            else:
                call.main_grad.product = partial(_add, buffer, partial(undone, torch.float32))
            grad_weight = no_gradient(buffer.shape, weight_dtype, grad_output.device)
    return grad_input, grad_weight


def _add(buffer: Tensor, product: Callable[[], Tensor]) -> None:
    """Add to ``buffer`` in FP32, rounded once."""
    buffer.copy_(buffer.float() + product())


def refuse_second_derivative() -> None:
    """Raise where the gradients of a backward pass are to have gradients of their own.

    Quantized GEMMs have none, and PyTorch would drop without a word what goes through weights.

    Raises:
        RuntimeError: the backward pass was asked for with ``create_graph=True``.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling():
        raise RuntimeError(
            "quantized GEMMs are differentiable once, and this backward pass has create_graph=True; compute what needs "
            "a second derivative outside autocast, or under autocast(enabled=False)"
        )


def no_gradient(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What stands for the gradient that :class:`Accumulate` computes: a tensor of one element that nobody reads."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)


def forward_operands(x: Tensor, weight: Tensor, call: Call) -> tuple[Operands, Operands]:
    """What the three products need of ``x`` and of ``weight``."""
    inp = ("input", x, call.needs_wgrad)
    if call.stored is not None:
        return quantize_forward(call, inp)[0], weight_operands(weight, call)
    of_input, of_weight = quantize_forward(call, inp, ("weight", weight, call.needs_dgrad))
    return of_input, of_weight


def weight_operands(weight: Tensor, call: Call) -> Operands:
    """What fprop and dgrad need of ``weight``: quantized now, or found where it is stored."""

    def make() -> Operands:
        return quantize_forward(call, ("weight", weight, call.needs_dgrad))[0]

    return make() if call.stored is None else call.stored(call.plan, call.needs_dgrad, make)


def quantize_forward(call: Call, *tensors: tuple[Literal["input", "weight"], Tensor, bool]) -> list[Operands]:
    """Of each tensor the operand of fprop, and what to keep for backward: never a byte that nobody reads.

    Args:
        tensors: role, tensor, and whether the backward pass needs something of it.
    """
    parts: list[Part] = []
    keep_rowwise: list[bool] = []
    for role, tensor, needs_backward in tensors:
        quantizer: Quantizer = getattr(call.plan, role)
        matrix = as_matrix(tensor)
        keeps_rowwise, columnwise, form = _sides(quantizer, call, needs_backward, matrix.device)
        given = None if role == "input" or call.shards is None else call.shards.weight_amaxes
        parts.append(Part(role, quantizer, matrix, {"columnwise": columnwise, "rowwise_form": form}, given))
        keep_rowwise.append(keeps_rowwise)
    operands: list[Operands] = []
    for i, quantized in enumerate(_quantize(parts, call)):
        rowwise, kept = quantized.rowwise, quantized.columnwise
        assert rowwise is not None
        if keep_rowwise[i]:
            kept = rowwise
        elif tensors[i][2] and call.plan.backward_override == "high_precision":
            kept = Operand.dense(parts[i].matrix)
        operands.append((rowwise, kept))
    return operands


def quantize_source(source: ops.Source, quantizer: Quantizer, call: Call, needs_backward: bool) -> Operands:
    """As :func:`quantize_forward`, of an input that only its cast computes."""
    keeps_rowwise, columnwise, form = _sides(quantizer, call, needs_backward, source.device)
    quantized = quantizer.quantize(source, columnwise=columnwise, rowwise_form=form)
    assert quantized.rowwise is not None
    return quantized.rowwise, quantized.rowwise if keeps_rowwise else quantized.columnwise


def _sides(quantizer: Quantizer, call: Call, needs_backward: bool, device: torch.device) -> tuple[bool, bool, ops.Form]:
    """Whether backward reads the rowwise operand; whether it reads the columnwise one; the rowwise one's form."""
    override = call.plan.backward_override
    if not needs_backward:
        keeps_rowwise = keeps_columnwise = False
    elif override is None:
        keeps_rowwise = quantizer.columnwise_source == "rowwise_dequantized"
        keeps_columnwise = not keeps_rowwise
    else:
        keeps_rowwise, keeps_columnwise = override == "dequantized", False
    clips = quantizer.clipped_gradient and (call.needs_dgrad or call.needs_wgrad)
    if keeps_rowwise or quantizer.rowwise_spec is None or clips:
        return keeps_rowwise, keeps_columnwise, "codes"
    return False, keeps_columnwise, ops.transient_form(quantizer.rowwise_spec.key, device, call.plan.backend)


def _quantize(parts: Sequence[Part], call: Call) -> list[QuantizedTensor]:
    """Quantize each part by itself, or as what it is of a tensor that other ranks share."""
    if call.shards is not None:
        return quantize_parts(parts, call.shards)
    return [part.quantizer.quantize(part.matrix, **part.arguments) for part in parts]


def quantize_grad(matrix: Tensor, call: Call, rng: Tensor | None) -> tuple[Operand | None, Operand | None]:
    """Both operands of the gradient, in one pass where it is quantized."""
    plan = call.plan
    if plan.backward_override is not None:
        return Operand.dense(matrix), Operand.dense(matrix.T)
    quantizer, device = plan.grad_output, matrix.device
    row_spec, col_spec = quantizer.rowwise_spec, quantizer.columnwise_spec
    row_form: ops.Form = "codes" if row_spec is None else ops.transient_form(row_spec.key, device, plan.backend)
    col_form: ops.Form = "codes" if col_spec is None else ops.transient_form(col_spec.key, device, plan.backend)
    asked = {
        "rowwise": call.needs_dgrad,
        "columnwise": call.needs_wgrad,
        "rng": rng,
        "rowwise_form": row_form,
        "columnwise_form": col_form,
    }
    (quantized,) = _quantize([Part("grad_output", quantizer, matrix, asked)], call)
    return quantized.rowwise, quantized.columnwise


def saved_operands(
    weight: Operand | TiledOperand | None, inp: Operand | None, call: Call, rng: Tensor | None
) -> tuple[Operand | None, Operand | None]:
    """The operands of dgrad and wgrad, from whatever of weight and input was kept."""
    right = None if weight is None else _columnwise("weight", weight, call, rng)
    return right, None if inp is None else _columnwise("input", inp, call, rng)


def _columnwise(
    role: Literal["input", "weight"], kept: Operand | TiledOperand, call: Call, rng: Tensor | None
) -> Operand:
    """The backward GEMM's operand, from what of the tensor was kept."""
    plan, quantizer = call.plan, getattr(call.plan, role)
    if isinstance(kept, TiledOperand):
        is_read_rowwise = plan.backward_override is not None or quantizer.columnwise_source != "original"
        kept = (kept.rowwise if is_read_rowwise else kept.columnwise)(quantizer.backend)
    if plan.backward_override is not None:
        return Operand.dense(kept.dequantize(call.dtype, plan.backend).T)
    if quantizer.columnwise_source != "rowwise_dequantized":
        return kept
    spec = quantizer.columnwise_spec
    form = "codes" if spec is None else ops.transient_form(spec.key, kept.data.device, plan.backend)
    if call.shards is None:
        return quantizer.requantize(kept, rng, form)
    values = kept.dequantize(torch.float32, quantizer.backend)
    asked = {"rowwise": False, "rng": rng, "columnwise_form": form}
    (quantized,) = quantize_parts([Part(role, quantizer, values, asked)], call.shards)
    assert quantized.columnwise is not None
    return quantized.columnwise
