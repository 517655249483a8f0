"""The builder that collects kernels: a direction of a layer becomes one launch, which is looked up in every call.

Layers whose GPU waits for the host need it. It changes no byte, since :mod:`fp4engine.ops` runs the same kernels.
What kernels do not compute, such as a product of PyTorch's, is a step of the host in the launch. Where no kernel casts
a tensor, :class:`NotCovered` says so, and :class:`~fp4engine.functional.eager.Eager` computes the layer.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4engine import ops
from fp4engine.constants import BLOCK_SIZE
from fp4engine.formats import CastSpec
from fp4engine.functional.eager import Eager
from fp4engine.functional.plan import LinearPlan
from fp4engine.functional.program import Request
from fp4engine.kernels import through_cast, tiles
from fp4engine.kernels.amax import add_fold
from fp4engine.kernels.amax_history import History, Past
from fp4engine.kernels.block_decode import add_block_decode
from fp4engine.kernels.casts import Wanted, add_casts
from fp4engine.kernels.checksum import add_comparison
from fp4engine.kernels.column_sums import add_column_sums
from fp4engine.kernels.dequantize import Codes, add_decode, add_decode_tiles, add_dequantize
from fp4engine.kernels.draw import add_draw, add_place
from fp4engine.kernels.factor import add_factor
from fp4engine.kernels.gemm import add_gemm
from fp4engine.kernels.launch import LaunchBuilder, Matrix, Place, TensorMeta
from fp4engine.kernels.load import Prologue, Reading
from fp4engine.kernels.norm import add_row_statistics
from fp4engine.ops import Operand, SquareOperand, TiledOperand, gemm_fp8
from fp4engine.ops.backend import KERNEL_DTYPES
from fp4engine.ops.cast import casts_supported, decode_supported, transient_form
from fp4engine.ops.checksum import Seal
from fp4engine.ops.draws import draw_from
from fp4engine.ops.gemm import product_path, values_dtype
from fp4engine.quantizers import Quantizer
from fp4engine.roles import GemmName, TensorType

Placed = Any
"""An :class:`~fp4engine.ops.Operand` with a :class:`Matrix` in place of each tensor."""


class NotCovered(Exception):
    """Raised where no kernels compute a part of the layer."""


class Setting(NamedTuple):
    """What a direction depends on beside its plan and its tensors.

    Attributes:
        replays: whether draws have to be values, since a forward takes them again.
        rank_bits: of the rank whose random bits are drawn, in a stream id; 0 where nothing is drawn.
        places: for each role where its matrix begins in a whole one, where it does.
    """

    replays: bool = False
    rank_bits: int = 0
    places: tuple[tuple[TensorType, tuple[int, int]], ...] = ()


class Question(NamedTuple):
    """What every launch depends on, whatever it computes.

    Attributes:
        names: what each input is, in their order: ``"state"`` of the random stream, ``"input row"`` for the amax that
            scales the rowwise operand of the input, ``"input values"`` and ``"input amax"`` for its history, and so on.
        told: metadata of the inputs; None for one that is not there.
        pasts: what the launch depends on of each role's history under delayed scaling.
    """

    plan: LinearPlan
    device: torch.device
    setting: Setting
    names: tuple[str, ...]
    told: tuple[TensorMeta | None, ...]
    pasts: tuple[tuple[TensorType, Past], ...] = ()


class Fused:
    """Verbs on the places of tensors in a launch.

    Attributes:
        builder: the launch.
        places: of the launch's inputs, by their names.
        paths: what runs, for :func:`fp4engine.executed_paths`.
        apart: what is saved as tensors of their own, since PyTorch makes or reads them.
    """

    def __init__(self, asked: Question) -> None:
        self.asked, self.plan, self.device = asked, asked.plan, asked.device
        self._eager = Eager(asked.plan, asked.device)
        self.builder = LaunchBuilder(asked.device, len(asked.told))
        self.places = dict(zip(asked.names, self.builder.inputs, strict=True))
        self._pasts, self._begins = dict(asked.pasts), dict(asked.setting.places)
        self.paths: list[str] = []
        self.apart: set[Place] = set()

    def input(self, index: int) -> Matrix | None:
        """An input of the launch."""
        told = self.asked.told[index]
        return None if told is None else Matrix(self.builder.inputs[index], told)

    def source(self, function: Any, x: Matrix, gamma: Matrix | None, beta: Matrix | None, dtype: torch.dtype) -> Any:
        """How kernels read the norm or activation ``function`` of x, rounded to ``dtype``; and the rows' statistics."""
        statistics = None
        if gamma is not None:
            found = add_row_statistics(self.builder, x, function.eps, function.has_bias)
            statistics = matrix_at(found, (2, x.shape[0]), torch.float32)
            self.apart.add(statistics.place)
            self.paths.append("row_statistics/triton")
        vectors = [None if vector is None else vector.place for vector in (statistics, gamma, beta)]
        prologue = Prologue.of(function.kernel, dtype, function.is_gated)
        return Reading(x.meta, prologue, x.place, (vectors[0], vectors[1], vectors[2])), statistics

    dense: Callable[[Any], Placed] = staticmethod(Operand.dense)

    def transposed(self, matrix: Matrix) -> Matrix:
        return matrix.transposed

    def draw(self, direction: ops.Direction, after: Matrix | None = None) -> Place:
        state = self.places["state"]
        if not self.asked.setting.replays:
            return add_draw(self.builder, state, 1)
        (drawn,) = self.builder.host_step(draw_from, (state,), ((2,), torch.int64))
        return drawn

    def cast(self, requests: Sequence[Request]) -> list[tuple[Placed, Placed]]:
        return [self._cast(request) for request in requests]

    def _cast(self, request: Request) -> tuple[Placed, Placed]:
        role, quantizer, tensor, rowwise, columnwise, rng, in_codes = request
        sides: tuple[bool, bool] = rowwise, columnwise
        reading = Reading(tensor.meta, None, tensor.place) if isinstance(tensor, Matrix) else tensor
        specs = [quantizer.rowwise_spec if rowwise else None, quantizer.columnwise_spec if columnwise else None]
        keys = ["" if spec is None else spec.key for spec in specs]
        if reading.dtype not in KERNEL_DTYPES or not casts_supported(keys[0], keys[1], reading.dtype)[0]:
            raise NotCovered
        wanted: list[Wanted | None] = [None, None]
        for side, spec in enumerate(specs):
            if spec is not None:
                if not spec.block[1] and spec.scale_rule.is_power_of_two:
                    raise NotCovered  # its amax is rounded before the cast
                form = "codes" if in_codes[side] else transient_form(spec.key, self.device, quantizer.backend)
                wanted[side] = Wanted(spec, form, self.places.get(f"{role} {('row', 'col')[side]}"))
        made: list[Placed] = [None, None]
        if any(keys):
            stream, place = quantizer.stream, self._begins.get(role)
            if rng is not None:
                stream |= self.asked.setting.rank_bits
                rng = rng if place is None else add_place(self.builder, rng, place)
            history = None
            if role in self._pasts:
                history = History(self._pasts[role], (self.places[f"{role} values"], self.places[f"{role} amax"]))
            is_placed = rng is not None and bool(place)
            operands = add_casts(self.builder, reading, wanted[0], wanted[1], rng, stream, is_placed, history)
            self.paths += ["quantize/triton"] + ["record_amax/triton"] * (history is not None)
            shapes = reading.shape, reading.shape[::-1]
            for side, (operand, want) in enumerate(zip(operands, wanted, strict=True)):
                if operand is not None and want is not None:
                    (rows, cols), (data, scale_inv, amax) = shapes[side], operand
                    amax = self._own(amax) if in_codes[side] and want.amax is not None else amax
                    made[side] = _operand(want.spec, rows, cols, data, scale_inv, amax)
        for side, spec in enumerate(specs):
            if sides[side] and spec is None:
                made[side] = self.dense(tensor.transposed if side else tensor)
        return made[0], made[1]

    def _own(self, amax: Matrix) -> Matrix:
        """A copy of an amax that was given, so that it is kept with the codes."""
        if amax.shape != (1,):
            raise NotCovered
        own = Matrix(self.builder.buffer((1,), torch.float32), amax.meta)
        add_fold(self.builder, (amax.place, None), (own.place, None), 1)
        return own

    def compare(self, x: Matrix, seal: Any) -> None:
        first, broken, spoiled = seal
        if len(first.shape):
            add_comparison(self.builder, x.place, x.meta, first.place, broken.place, spoiled)
            return

        def compare(x: Tensor, first: Tensor, broken: Tensor, *spoiled: Tensor) -> None:
            self._eager.compare(x, Seal(first, broken, spoiled))

        self._on_host(compare, (x, first, broken, *spoiled))

    def recall(self, quantizer: Quantizer, kept: Any, columnwise: bool) -> Placed:
        is_square, is_tiled = isinstance(kept, SquareOperand), isinstance(kept, TiledOperand)
        stored: Placed = kept.operand if is_square else kept
        if not is_tiled and not (is_square and columnwise):
            return stored
        spec: CastSpec = stored.spec
        if not (tiles.supports(spec)[0] and decode_supported(spec.key)[0]):
            raise NotCovered
        self.paths.append("spread_tiles/triton")
        if is_square:
            _, rows, cols, data, scale_inv, amax = stored
            transposed = tiles.add_transposed(self.builder, data.place, scale_inv.place, spec, rows, cols)
            return _operand(spec, cols, rows, *transposed, amax)
        _, rows, cols, parts, packed = stored
        tiled = tiles.Tiles(packed.place, spec, rows, cols, parts)
        amax = matrix_at(tiled.amax(self.builder), (1,), torch.float32)
        if columnwise:
            return _operand(spec, cols, rows, *tiles.add_spread(self.builder, tiled, transposed=True), amax)
        values = self.builder.matrix((rows, spec.padded_cols(cols)), torch.bfloat16)
        add_decode_tiles(self.builder, tiled, values.place)
        return _operand(spec, rows, cols, values, None, amax)

    def in_dtype(self, operand: Placed, dtype: torch.dtype) -> Placed:
        return operand if operand.spec is not None else self.dense(self._converted(operand.data, dtype))

    def _converted(self, matrix: Matrix, dtype: torch.dtype) -> Matrix:
        if matrix.dtype == dtype:
            return matrix
        return self._on_host(methodcaller("to", dtype), (matrix,), matrix.shape, dtype)

    def decode(self, operand: Placed, dtype: torch.dtype, backend: str) -> Matrix:
        spec, _, cols, data, scale_inv, amax = operand
        if spec is None:
            return self._converted(data, dtype)
        if scale_inv is None or amax is None or dtype not in KERNEL_DTYPES:
            raise NotCovered
        self.paths.append("dequantize/triton")
        if decode_supported(spec.key)[0]:
            return add_dequantize(self.builder, data, scale_inv.place, amax.place, spec, cols, dtype)
        width = cols if spec.rotation is None else spec.padded_cols(cols)
        return add_block_decode(self.builder, data, scale_inv.place, amax.place, spec, width, dtype)

    def within(self, tensor: Matrix, operand: Placed) -> Matrix:
        spec, *_, scale_inv, amax = operand
        is_covered = isinstance(tensor, Matrix) and through_cast.supports(operand.key, tensor.dtype)[0]
        if scale_inv is None or not is_covered:
            raise NotCovered
        self.paths.append("within_range/triton")
        return through_cast.add_within(self.builder, tensor, scale_inv.place, amax.place, spec)

    def product(
        self,
        name: GemmName,
        left: Placed,
        right: Placed,
        dtype: torch.dtype,
        bias: Matrix | None = None,
        out: Matrix | None = None,
    ) -> Matrix:
        plan, m, n, keys = self.plan, left.rows, right.rows, (left.key, right.key)
        auto, are_codes = plan.backend in ("auto", "native"), left.scale_inv is not None and right.scale_inv is not None
        by_fp8 = auto and all(keys) and gemm_fp8.supports(*keys, self.device)[0]
        is_small = by_fp8 and gemm_fp8.is_small(m, n, left.cols, plan.backend, self.device)
        if by_fp8 and not is_small and out is None and dtype in KERNEL_DTYPES:
            return self._fp8(name in plan.fast_accumulation, left, right, dtype, bias)
        has_blocks = auto and are_codes and gemm_fp8.multiplies_blocks(*keys, self.device)
        numerator, by_host = 0.0, True
        if all(keys) and not has_blocks and plan.accumulation == "fp32":
            path, _, numerator, is_factored = product_path(*keys, are_codes, dtype, self.device, plan.backend)
            by_host = path != "triton" or is_factored or (by_fp8 and not is_small)
        if by_host:

            def multiply(left: Operand, right: Operand, bias: Tensor | None, out: Tensor | None) -> Tensor:
                return self._eager.product(name, left, right, dtype, bias, out)

            if out is None:
                return self._on_host(multiply, (left, right, bias, None), (m, n), dtype)
            return self._on_host(multiply, (left, right, bias, out))
        self.paths.append("gemm/triton")
        a, b = [self._fp8_codes(o) if by_fp8 else self._values(o, values_dtype(*keys)) for o in (left, right)]
        amaxes, by_rows = (left.amax.place, right.amax.place), (left.amax.shape[0] > 1, right.amax.shape[0] > 1)
        bias_place = None if bias is None else bias.place
        return add_gemm(self.builder, a, b, *amaxes, bias_place, numerator, by_rows, out, dtype)

    def _fp8(self, fast: bool, left: Placed, right: Placed, dtype: torch.dtype, bias: Matrix | None) -> Matrix:
        """A product of PyTorch's of codes with one scale per tensor."""
        numerator = left.spec.numerator * right.spec.numerator
        made = add_factor(self.builder, left.amax.place, right.amax.place, numerator)
        factors = [matrix_at(place, (1, 1), torch.float32) for place in made]
        codes = self._fp8_codes(left), self._fp8_codes(right)
        self.paths.append("gemm/fp8")

        def multiply(a: Tensor, b: Tensor, alpha: Tensor, one: Tensor, bias: Tensor | None) -> Tensor:
            return gemm_fp8.multiply(a, b, alpha, one, bias, dtype, fast)

        return self._on_host(multiply, (*codes, *factors, bias), (left.rows, right.rows), dtype)

    def _fp8_codes(self, operand: Placed) -> Matrix:
        """The codes of an operand without block scales as numbers of FP8."""
        data, dtype = operand.data, operand.spec.element.torch_dtype
        return Matrix(self.builder.part(data.place, 0, data.shape, dtype), data.meta._replace(dtype=dtype))

    def _values(self, operand: Placed, dtype: torch.dtype) -> Matrix:
        """What kernels multiply of an operand, in ``dtype``: decoded where it is first read, to be read at once."""
        spec, rows, cols, data, scale_inv, _ = operand
        if scale_inv is None:
            return self._converted(data, dtype)
        width = spec.padded_cols(cols)
        if dtype != torch.bfloat16 or not decode_supported(spec.key)[0]:
            return add_block_decode(self.builder, data, scale_inv.place, None, spec, width, dtype)
        values = self.builder.matrix((rows, width), dtype)
        codes = Codes(data.place, scale_inv.place, rows, width // BLOCK_SIZE)
        add_decode(self.builder, [codes], [values.place])
        return values

    def undo(
        self,
        values: Matrix,
        within: Matrix | None,
        rotated: str,
        cols: int,
        dtype: torch.dtype,
        out: Matrix | None = None,
    ) -> Matrix | None:
        if dtype not in KERNEL_DTYPES:
            raise NotCovered
        self.paths.append("clip_and_rotate_back/triton")
        rotation = CastSpec.from_key(rotated).rotation if rotated else None
        wanted = dtype if out is None else torch.float32
        gradient = through_cast.add_back(self.builder, values, within, rotation, cols, wanted)
        if out is None:
            return gradient
        self._on_host(Tensor.add_, (out, gradient))
        return None

    def column_sum(self, grad_output: Matrix, dtype: torch.dtype) -> Matrix:
        cols = grad_output.shape[1]
        if not self.plan.sums_in_order or grad_output.meta.strides[1] != 1 or dtype not in KERNEL_DTYPES:
            summed = partial(self._eager.column_sum, dtype=dtype)
            return self._on_host(summed, (grad_output,), (cols,), dtype)
        out = self.builder.buffer((cols,), dtype)
        add_column_sums(self.builder, grad_output, out)
        return matrix_at(out, (cols,), dtype)

    def _on_host(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Placed | Matrix | None],
        shape: tuple[int, ...] = (),
        dtype: torch.dtype | None = None,
    ) -> Any:
        """A step of the host.

        Args:
            function: takes tensors and operands in place of ``arguments``.
            shape, dtype: of the tensor that it returns; without a dtype it returns none.
        """
        reads: list[Place] = []

        def reader(argument: Any) -> Callable[[Sequence[Tensor]], Any]:
            """How an argument is made of the tensors of ``reads``."""
            if argument is None:
                return lambda tensors: None
            if isinstance(argument, Matrix):
                index, turned = len(reads), argument.turned
                reads.append(argument.place)
                return lambda tensors: tensors[index].T if turned else tensors[index]
            spec, rows, cols, *parts = argument
            readers = [reader(part) for part in parts]
            return lambda tensors: _operand(spec, rows, cols, *[read(tensors) for read in readers])

        readers = [reader(argument) for argument in arguments]
        if dtype is None:
            self.builder.host_step(lambda *tensors: function(*[read(tensors) for read in readers]), reads)
            return None
        run: Callable[..., Tensor] = lambda *tensors: function(*[read(tensors) for read in readers]).contiguous()
        (made,) = self.builder.host_step(run, reads, (shape, dtype))
        self.apart.add(made)
        return matrix_at(made, shape, dtype)


def contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> TensorMeta:
    """The metadata of a tensor that is allocated."""
    return TensorMeta(shape, tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape))), dtype, True)


def matrix_at(place: Place, shape: tuple[int, ...], dtype: torch.dtype) -> Matrix:
    """The contiguous matrix, or vector, that lies at ``place``."""
    return Matrix(place, contiguous(shape, dtype))


_operand: Callable[..., Placed] = Operand
