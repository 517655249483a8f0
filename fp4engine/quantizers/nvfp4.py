"""NVFP4 by TransformerEngine's arguments."""

from dataclasses import dataclass

from fp4engine.environment import read_choice
from fp4engine.quantizers.base import Quantizer
from fp4engine.recipe.base import BACKENDS
from fp4engine.recipe.nvfp4 import nvfp4_casts


@dataclass(frozen=True, init=False)
class NVFP4Quantizer(Quantizer):
    """NVFP4 operands: E2M1 codes, E4M3 scale per 16 or per 16x16, FP32 scale per tensor or row.

    Source: TransformerEngine ``pytorch/tensor/nvfp4_tensor.py``, ``NVFP4Quantizer``.
    """

    def __init__(
        self,
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
        stream: int = 0,
        backend: str | None = None,
    ) -> None:
        """Build both casts from TransformerEngine's switches.

        Args:
            with_rht: rotate the columnwise operand in groups of 16.
            with_2d_quantization: one block scale per 16x16 tile.
            stochastic_rounding: round elements stochastically, both sides.
            row_scaled_nvfp4: one FP32 outer scale per row of each operand.
            nvfp4_use_4over6: choose per block between mapping the amax to 6 and to 4.
            nvfp4_e4m3_max: block-scale bound under 4over6, 448 or 256.
            nvfp4_4over6_err_mode: ``"MAE"`` or ``"MSE"``.
            with_random_sign_mask: False uses the Hadamard matrix without signs.
            guarded: aim block maxima at ``6 * 16/17``, so that stochastic rounding never saturates and is exactly
                unbiased; costs about a quarter more error.
            random_bits: random bits per element, 8 or 16.
            stream: stream id of the role.
            backend: ``auto``, ``reference``, ``triton`` or ``native``; None reads ``NVTE_FP4_BACKEND``.

        Raises:
            ValueError: arguments outside their words, or that contradict each other.
        """
        if backend is None:
            backend = read_choice("NVTE_FP4_BACKEND", BACKENDS, "auto") or "auto"
        casts = nvfp4_casts(
            with_rht=with_rht,
            with_2d_quantization=with_2d_quantization,
            stochastic_rounding=stochastic_rounding,
            row_scaled_nvfp4=row_scaled_nvfp4,
            nvfp4_use_4over6=nvfp4_use_4over6,
            nvfp4_e4m3_max=nvfp4_e4m3_max,
            nvfp4_4over6_err_mode=nvfp4_4over6_err_mode,
            with_random_sign_mask=with_random_sign_mask,
            guarded=guarded,
            random_bits=random_bits,
        )
        Quantizer.__init__(self, casts.rowwise, casts.columnwise, stream=stream, backend=backend)
