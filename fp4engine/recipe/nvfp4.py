"""NVIDIA's NVFP4 training recipe.

| GEMM | left | right |
|---|---|---|
| fprop | input 1x16 | weight 16x16 |
| dgrad | grad_output 1x16, stochastic | weight 16x16 |
| wgrad | grad_output 1x16, stochastic, rotated | input 1x16, rotated |

Source: arXiv 2509.25149; TransformerEngine ``common/recipe/__init__.py``, ``NVFP4BlockScaling``.
"""

import dataclasses
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any

from fp4engine.arguments import require_bools, require_one_of
from fp4engine.constants import BLOCK_SIZE, E2M1_MAX, E4M3_BOUND_4OVER6, E4M3_MAX, SR_GUARD
from fp4engine.environment import choice, flag
from fp4engine.formats import CastSpec, Outer, Rotation, RoundingMode, ScaleRule, Signs
from fp4engine.recipe.base import Format, QParams, Recipe, require_keys
from fp4engine.recipe.casts import Casts
from fp4engine.roles import TENSOR_TYPES

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
        fp4_quant_fwd_inp, fp4_quant_fwd_weight, fp4_quant_bwd_grad: what the switches come to for each role. As
            arguments, of the constructor and of :meth:`replace`, they set the switches and win over them.

    Raises:
        ValueError: an argument or flag outside its words, or QParams that no setting of the switches comes to; the
            message names it.
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
    fp4_quant_fwd_inp: InitVar[QParams | None] = None
    fp4_quant_fwd_weight: InitVar[QParams | None] = None
    fp4_quant_bwd_grad: InitVar[QParams | None] = None

    def __post_init__(
        self,
        fp4_quant_fwd_inp: QParams | None,
        fp4_quant_fwd_weight: QParams | None,
        fp4_quant_bwd_grad: QParams | None,
    ) -> None:
        given = dict(zip(_ROLES, (fp4_quant_fwd_inp, fp4_quant_fwd_weight, fp4_quant_bwd_grad), strict=True))
        self._follow({name: qparams for name, qparams in given.items() if qparams is not None})
        super().__post_init__()
        require_one_of("nvfp4_4over6", self.nvfp4_4over6, SCOPES)
        require_one_of("nvfp4_4over6_e4m3_use_256", self.nvfp4_4over6_e4m3_use_256, SCOPES)
        require_one_of("nvfp4_4over6_err_mode", self.nvfp4_4over6_err_mode, ERROR_MODES)
        require_one_of("fp4_format", self.fp4_format, (Format.E2M1,))
        require_one_of("fp8_format", self.fp8_format, (Format.E4M3,))

    def replace(self, **changes: Any) -> Recipe:
        """A copy with ``changes`` applied; the environment is not read again.

        Raises:
            ValueError: no such field, or a value that the field does not take.
        """
        known = (field.name for field in dataclasses.fields(self))
        require_keys(type(self).__name__, changes, (*known, *_ROLES))
        return dataclasses.replace(self, **dict.fromkeys(_ROLES) | changes)  # what is not given follows from the rest

    def _follow(self, given: dict[str, QParams]) -> None:
        """Set the switches so that they come to ``given``.

        Raises:
            ValueError: there is no such setting.
        """
        for name, qparams in given.items():
            if not isinstance(qparams, QParams):
                raise ValueError(f"{name} must be QParams or None, got {qparams!r}")
            for switch, field in _SWITCHES[name].items():
                object.__setattr__(self, switch, not getattr(qparams, field))
        for name, qparams in given.items():
            if _qparams(self, name) != qparams:
                raise ValueError(
                    f"{name} must be {_qparams(self, name)} beside the other settings, got {qparams}: the transform "
                    "acts on input and grad_output together, only gradients round stochastically, and only weights "
                    "have 16x16 blocks; LinearRecipe takes any casts"
                )

    def quantizer_arguments(self, tensor_type: str) -> dict[str, Any]:
        """What :class:`~fp4engine.NVFP4Quantizer` is made with for ``"input"``, ``"weight"`` or ``"grad_output"``."""
        require_one_of("tensor_type", tensor_type, TENSOR_TYPES)
        name, scope = {
            "input": ("fp4_quant_fwd_inp", "activations"),
            "weight": ("fp4_quant_fwd_weight", "weights"),
            "grad_output": ("fp4_quant_bwd_grad", "gradients"),
        }[tensor_type]
        qparams = _qparams(self, name)
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


_SWITCHES = {
    "fp4_quant_fwd_inp": {"disable_rht": "random_hadamard_transform"},
    "fp4_quant_fwd_weight": {"disable_2d_quantization": "fp4_2d_quantization"},
    "fp4_quant_bwd_grad": {
        "disable_rht": "random_hadamard_transform",
        "disable_stochastic_rounding": "stochastic_rounding",
    },
}
"""Role of TransformerEngine's -> the switches that act on it, and what each of them switches off."""
_ROLES = tuple(_SWITCHES)


def _qparams(recipe: NVFP4BlockScaling, name: str) -> QParams:
    """What the switches of ``recipe`` come to for the role ``name``.

    The transform acts on the columnwise operands of input and grad_output, which meet in wgrad, and on no weight.
    """
    return QParams(**{field: not getattr(recipe, switch) for switch, field in _SWITCHES[name].items()})


for _name in _ROLES:  # an attribute beside an argument of one name: dataclasses know no other way
    _doc = f"What becomes of {_name.removeprefix('fp4_quant_')}."
    setattr(NVFP4BlockScaling, _name, property(partial(_qparams, name=_name), doc=_doc))


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
    require_one_of("nvfp4_e4m3_max", nvfp4_e4m3_max, (448, 256))
    require_one_of("nvfp4_4over6_err_mode", nvfp4_4over6_err_mode, ERROR_MODES)
    require_bools(
        with_rht=with_rht,
        with_2d_quantization=with_2d_quantization,
        stochastic_rounding=stochastic_rounding,
        row_scaled_nvfp4=row_scaled_nvfp4,
        nvfp4_use_4over6=nvfp4_use_4over6,
        with_random_sign_mask=with_random_sign_mask,
        guarded=guarded,
    )
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
