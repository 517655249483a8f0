"""TransformerEngine's FP8 recipes: per tensor (delayed or current scaling), per block, and microscaling.

Source: TransformerEngine ``common/recipe/__init__.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fp4engine.arguments import require_callable, require_integer, require_one_of
from fp4engine.environment import flag
from fp4engine.formats import E4M3, E5M2, CastSpec, ElementFormat, ScaleRule, fp8, fp8_block, mx
from fp4engine.recipe.base import Format, MMParams, QParams, Recipe, require_object
from fp4engine.recipe.casts import Casts, unsummable
from fp4engine.roles import GEMMS, TENSOR_TYPES

FP8_FORMATS = (Format.HYBRID, Format.E4M3, Format.E5M2)
FAST = MMParams(use_split_accumulator=False)
SPLIT = MMParams(use_split_accumulator=True)
_GEMM_OPTIONS = {gemm: f"fp8_gemm_{gemm}" for gemm in GEMMS}
"""``gemm -> field`` of its options."""
_BLOCK_DIMS = {"input": "x_block_scaling_dim", "weight": "w_block_scaling_dim", "grad_output": "grad_block_scaling_dim"}
"""``role -> field`` of its blocks."""


@dataclass(frozen=True)
class _FP8Recipe(Recipe):
    """Base of the FP8 recipes, some of which have options of GEMMs among their fields."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("fp8_format", vars(self)["fp8_format"], FP8_FORMATS)
        if complaint := unsummable(self.accumulation, "an operand", fp8(E4M3)):
            raise ValueError(complaint)

    def casts(self, tensor_type: str) -> Casts:
        """The casts of a role, whose rowwise and columnwise operands are cast alike."""
        spec = self._spec(tensor_type)
        return Casts(spec, spec)

    def _spec(self, tensor_type: str) -> CastSpec:
        raise NotImplementedError

    def _element(self, tensor_type: str) -> ElementFormat:
        require_one_of("tensor_type", tensor_type, TENSOR_TYPES)
        fp8_format = vars(self)["fp8_format"]
        is_e5m2 = fp8_format is Format.E5M2 or (fp8_format is Format.HYBRID and tensor_type == "grad_output")
        return E5M2 if is_e5m2 else E4M3

    @classmethod
    def _from_plain(cls, name: str, value: Any) -> Any:
        if name in _GEMM_OPTIONS.values():
            return MMParams(**require_object(name, value, ("use_split_accumulator",)))
        return super()._from_plain(name, value)


@dataclass(frozen=True)
class Float8CurrentScaling(_FP8Recipe):
    """One scale per tensor, from the tensor itself: ``code = fp8(x * max / amax)``.

    Attributes:
        use_power_2_scales: round scales down to powers of two. Flag ``NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES``.
        fp8_format: ``Format.HYBRID``, ``E4M3`` or ``E5M2``.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: options of the GEMMs.
        fp8_dpa, fp8_mha: attention stays in high precision; only False.
    """

    use_power_2_scales: bool = flag("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES")
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = FAST
    fp8_gemm_dgrad: MMParams = SPLIT
    fp8_gemm_wgrad: MMParams = SPLIT
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _GEMM_OPTIONS.values():
            require_one_of(name, getattr(self, name), (FAST, SPLIT))

    @property
    def fp8_quant_fwd_inp(self) -> QParams:
        """What happens to the input, and to the weight and the output gradient as well."""
        return QParams(power_2_scale=self.use_power_2_scales)

    fp8_quant_fwd_weight = fp8_quant_bwd_grad = fp8_quant_fwd_inp

    def _spec(self, tensor_type: str) -> CastSpec:
        return fp8(self._element(tensor_type), power_of_two=self.use_power_2_scales)

    def mm_params(self, gemm: str) -> MMParams:
        """The settings of a GEMM: ``"fprop"``, ``"dgrad"`` or ``"wgrad"``."""
        require_one_of("gemm", gemm, GEMMS)
        return getattr(self, _GEMM_OPTIONS[gemm])


@dataclass(frozen=True)
class DelayedScaling(_FP8Recipe):
    """One scale per tensor, from the amaxes of earlier steps: ``code = fp8(x * max / A / 2^margin)``.

    ``A`` is chosen once per step, when the outermost autocast region has closed, and is the format's own maximum
    (scale one) until an amax has been seen. Histories belong to the modules; see :func:`fp4engine.get_amax_history`.

    Attributes:
        margin: binades left free above ``A``.
        fp8_format: ``Format.HYBRID``, ``E4M3`` or ``E5M2``.
        amax_history_len: steps remembered.
        amax_compute_algo: ``"max"`` over the history, ``"most_recent"``, or ``history [len] -> amax``.
        scaling_factor_compute_algo: None for the formula above, or
            ``(A, old scale, largest element, recipe) -> new scale``, of FP32 tensors [1].
        reduce_amax: share amaxes over autocast's ``amax_reduction_group``. Amaxes of tensors of
            which each rank has a part are shared in any case.
        backward_override: only None.
        fp8_dpa, fp8_mha: only False.
    """

    is_delayed: ClassVar[bool] = True

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Tensor], Tensor] = "max"
    scaling_factor_compute_algo: Callable[[Tensor, Tensor, Tensor, "DelayedScaling"], Tensor] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "margin", require_integer("margin", self.margin, 0, 7))
        length = require_integer("amax_history_len", self.amax_history_len, 1)
        object.__setattr__(self, "amax_history_len", length)
        super().__post_init__()
        if self.backward_override is not None:
            raise ValueError(
                "DelayedScaling's backward_override (flag NVTE_BACKWARD_OVERRIDE) must be None, "
                f"got {self.backward_override!r}"
            )
        if self.scaling_factor_compute_algo is not None:
            require_callable("scaling_factor_compute_algo", self.scaling_factor_compute_algo)
        if not callable(self.amax_compute_algo):
            require_one_of("amax_compute_algo", self.amax_compute_algo, ("max", "most_recent"))

    def _spec(self, tensor_type: str) -> CastSpec:
        return fp8(self._element(tensor_type), margin=self.margin)

    def mm_params(self, gemm: str) -> MMParams:
        """Fast accumulation in fprop, as TransformerEngine does."""
        require_one_of("gemm", gemm, GEMMS)
        return FAST if gemm == "fprop" else SPLIT


@dataclass(frozen=True)
class Float8BlockScaling(_FP8Recipe):
    """One scale per 1x128 (inputs, gradients) or 128x128 (weights).

    Attributes:
        use_f32_scales: FP32 scales instead of powers of two. Flag ``NVTE_FP8_BLOCK_SCALING_FP32_SCALES``.
        fp8_format: ``Format.E4M3``, ``HYBRID`` or ``E5M2``.
        x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim: 1 for 1x128, 2 for 128x128; at most one
            operand of a GEMM is 2.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: options of the GEMMs, which take the split accumulator only.
        fp8_dpa, fp8_mha: only False.
    """

    use_f32_scales: bool = flag("NVTE_FP8_BLOCK_SCALING_FP32_SCALES")
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = SPLIT
    fp8_gemm_dgrad: MMParams = SPLIT
    fp8_gemm_wgrad: MMParams = SPLIT
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        dims = {name: getattr(self, name) for name in _BLOCK_DIMS.values()}
        for name, dim in dims.items():
            require_one_of(name, dim, (1, 2))
        for name in _GEMM_OPTIONS.values():
            require_one_of(name, getattr(self, name), (SPLIT,))
        if list(dims.values()).count(2) > 1:
            raise ValueError(f"two operands in 128x128 blocks would meet in one GEMM; at most one may be 2, got {dims}")

    @property
    def fp8_quant_fwd_inp(self) -> QParams:
        """What happens to the input, and to the weight and the output gradient as well."""
        return QParams(power_2_scale=not self.use_f32_scales)

    fp8_quant_fwd_weight = fp8_quant_bwd_grad = fp8_quant_fwd_inp

    def _spec(self, tensor_type: str) -> CastSpec:
        element = self._element(tensor_type)
        rows = 128 if getattr(self, _BLOCK_DIMS[tensor_type]) == 2 else 1
        return fp8_block(element, rows, power_of_two=not self.use_f32_scales)


@dataclass(frozen=True)
class MXFP8BlockScaling(_FP8Recipe):
    """Blocks of 32 with a power-of-two scale that saturates nothing.

    Attributes:
        margin: only 0, as in TransformerEngine, which ignores it.
        fp8_format: ``Format.E4M3``, ``HYBRID`` or ``E5M2``.
        enable_2d_quantization: one scale per 32x32 of the weight.
        fp8_dpa, fp8_mha: only False.
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    enable_2d_quantization: bool = False
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("margin", self.margin, (0,))

    def _spec(self, tensor_type: str) -> CastSpec:
        rows = 32 if tensor_type == "weight" and self.enable_2d_quantization else 1
        return mx(self._element(tensor_type), ScaleRule.TOPBINADE, rows=rows)
