"""NVIDIA's NVFP4 training recipe.

| GEMM | left | right |
|---|---|---|
| fprop | input 1x16 | weight 16x16 |
| dgrad | grad_output 1x16, stochastic | weight 16x16 |
| wgrad | grad_output 1x16, stochastic, rotated | input 1x16, rotated |

Source: arXiv 2509.25149; TransformerEngine ``common/recipe/__init__.py``, ``NVFP4BlockScaling``.
"""

from dataclasses import dataclass
from typing import Any

from fp4engine.constants import BLOCK_SIZE, E2M1_MAX, E4M3_BOUND_4OVER6, E4M3_MAX, SR_GUARD
from fp4engine.environment import choice, flag
from fp4engine.formats import CastSpec, Outer, Rotation, RoundingMode, ScaleRule, Signs
from fp4engine.recipe.base import Format, QParams, Recipe, require
from fp4engine.recipe.casts import Casts

SCOPES = ("none", "weights", "activations", "all")
ERROR_MODES = ("MAE", "MSE")


@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """Two-level NVFP4 scaling with TransformerEngine's switches. Frozen; flags are read when it is constructed.

    Attributes:
        disable_rht: no random Hadamard transform in wgrad. Flag ``NVTE_NVFP4_DISABLE_RHT``.
        disable_stochastic_rounding: gradients round to nearest. Flag
            ``NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING``.
        disable_2d_quantization: weights use 1x16 blocks. Flag ``NVTE_NVFP4_DISABLE_2D_QUANTIZATION``.
        row_scaled_activation: the input has one FP32 outer scale per row instead of per tensor. Flag
            ``NVTE_NVFP4_ROW_SCALED_ACTIVATION``.
        nvfp4_4over6: which tensors choose, per block, between mapping their amax to 6 and to 4: ``"none"``,
            ``"weights"``, ``"activations"``, ``"all"``. Flag ``NVTE_NVFP4_4OVER6``.
        nvfp4_4over6_e4m3_use_256: which of those bound block scales by 256 instead of 448. Flag
            ``NVTE_NVFP4_4OVER6_E4M3_USE_256``.
        nvfp4_4over6_err_mode: ``"MAE"`` or ``"MSE"``. Flag ``NVTE_NVFP4_4OVER6_ERR_MODE``.
        fp4_format: only ``Format.E2M1``.
        fp8_format: format of block scales, only ``Format.E4M3``.
        fp8_dpa, fp8_mha: attention stays in high precision; only False.

    Raises:
        ValueError: an argument or flag outside its words; the message names it.
    """

    disable_rht: bool = flag("NVTE_NVFP4_DISABLE_RHT")
    disable_stochastic_rounding: bool = flag("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING")
    disable_2d_quantization: bool = flag("NVTE_NVFP4_DISABLE_2D_QUANTIZATION")
    row_scaled_activation: bool = flag("NVTE_NVFP4_ROW_SCALED_ACTIVATION")
    nvfp4_4over6: str = choice("NVTE_NVFP4_4OVER6", SCOPES, "none")
    nvfp4_4over6_e4m3_use_256: str = choice("NVTE_NVFP4_4OVER6_E4M3_USE_256", SCOPES, "all")
    nvfp4_4over6_err_mode: str = choice("NVTE_NVFP4_4OVER6_ERR_MODE", ERROR_MODES, "MAE")
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require("nvfp4_4over6", self.nvfp4_4over6, SCOPES)
        require("nvfp4_4over6_e4m3_use_256", self.nvfp4_4over6_e4m3_use_256, SCOPES)
        require("nvfp4_4over6_err_mode", self.nvfp4_4over6_err_mode, ERROR_MODES)
        require("fp4_format", self.fp4_format, (Format.E2M1,))
        require("fp8_format", self.fp8_format, (Format.E4M3,))
        require("fp8_dpa", self.fp8_dpa, (False,))
        require("fp8_mha", self.fp8_mha, (False,))

    @property
    def fp4_quant_fwd_inp(self) -> QParams:
        """What happens to the input; the transform acts on its columnwise operand only."""
        return QParams(random_hadamard_transform=not self.disable_rht)

    @property
    def fp4_quant_fwd_weight(self) -> QParams:
        """What happens to the weight; no transform, since its GEMM partners are not rotated."""
        return QParams(fp4_2d_quantization=not self.disable_2d_quantization)

    @property
    def fp4_quant_bwd_grad(self) -> QParams:
        """What happens to the output gradient, both directions."""
        return QParams(
            random_hadamard_transform=not self.disable_rht,
            stochastic_rounding=not self.disable_stochastic_rounding,
        )

    def quantizer_arguments(self, tensor_type: str) -> dict[str, Any]:
        """What :class:`~fp4engine.NVFP4Quantizer` is made with for ``"input"``, ``"weight"`` or ``"grad_output"``."""
        qparams, scope = {
            "input": (self.fp4_quant_fwd_inp, "activations"),
            "weight": (self.fp4_quant_fwd_weight, "weights"),
            "grad_output": (self.fp4_quant_bwd_grad, "gradients"),
        }[tensor_type]
        four_over_six = scope != "gradients" and self.nvfp4_4over6 in ("all", scope)
        use_256 = four_over_six and self.nvfp4_4over6_e4m3_use_256 in ("all", scope)
        return {
            "with_rht": qparams.random_hadamard_transform,
            "with_2d_quantization": qparams.fp4_2d_quantization,
            "stochastic_rounding": qparams.stochastic_rounding,
            "row_scaled_nvfp4": self.row_scaled_activation and tensor_type == "input",
            "nvfp4_use_4over6": four_over_six,
            "nvfp4_e4m3_max": 256 if use_256 else 448,
            "nvfp4_4over6_err_mode": self.nvfp4_4over6_err_mode,
        }

    def casts(self, tensor_type: str) -> Casts:
        """The casts of a role."""
        return nvfp4_casts(**self.quantizer_arguments(tensor_type))


def nvfp4_casts(
    *,
    with_rht: bool = False,
    with_2d_quantization: bool = False,
    stochastic_rounding: bool = False,
    row_scaled_nvfp4: bool = False,
    nvfp4_use_4over6: bool = False,
    nvfp4_e4m3_max: int = 448,
    nvfp4_4over6_err_mode: str = "MAE",
    with_random_sign_mask: bool = True,
    guarded: bool = False,
    random_bits: int = 8,
) -> Casts:
    """Both casts from TransformerEngine's switches; arguments as in :class:`~fp4engine.NVFP4Quantizer`.

    Raises:
        ValueError: arguments outside their words, or that contradict each other.
    """
    require("nvfp4_e4m3_max", nvfp4_e4m3_max, (448, 256))
    require("nvfp4_4over6_err_mode", nvfp4_4over6_err_mode, ERROR_MODES)
    if row_scaled_nvfp4 and with_2d_quantization:
        raise ValueError("row_scaled_nvfp4=True goes with 1x16 blocks, got with_2d_quantization=True")
    if nvfp4_use_4over6 and stochastic_rounding:
        raise ValueError(
            "nvfp4_use_4over6=True with stochastic_rounding=True is biased (the choice depends on the draw); "
            "LinearRecipe(..., allow_biased=True) accepts it for study"
        )
    if not nvfp4_use_4over6 and nvfp4_e4m3_max != 448:
        raise ValueError(f"nvfp4_e4m3_max={nvfp4_e4m3_max} goes with nvfp4_use_4over6=True; otherwise it is 448")
    rule = ScaleRule("4over6_" + nvfp4_4over6_err_mode.lower()) if nvfp4_use_4over6 else ScaleRule.AMAX
    rowwise = CastSpec(
        block=(BLOCK_SIZE, BLOCK_SIZE) if with_2d_quantization else (1, BLOCK_SIZE),
        scale_rule=rule,
        scale_bound=E4M3_BOUND_4OVER6 if nvfp4_e4m3_max == 256 else E4M3_MAX,
        target=E2M1_MAX * SR_GUARD if guarded else E2M1_MAX,
        outer=Outer.ROW if row_scaled_nvfp4 else Outer.TENSOR,
        rounding=RoundingMode.STOCHASTIC if stochastic_rounding else RoundingMode.EVEN,
        random_bits=random_bits,
    )
    signs = Signs.FIXED if with_random_sign_mask else Signs.NONE
    return Casts(rowwise, rowwise.replace(rotation=Rotation(signs=signs)) if with_rht else rowwise)
