"""Assertions about quantized operands; hypothesis strategies are in :mod:`fp4engine.testing.strategies`."""

from fp4engine.testing.assertions import assert_codes_adjacent, assert_codes_bitwise, assert_scales_adjacent

__all__ = ["assert_codes_adjacent", "assert_codes_bitwise", "assert_scales_adjacent"]
