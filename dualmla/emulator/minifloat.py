"""Floats of 16 bits and fewer: their bit patterns as numbers and back, rounding to nearest even.

A format is `(exponent bits, mantissa bits, exponent bias, kind)`; what its top codes mean is its kind: `IEEE` has
infinities and NaNs (bf16, f16, e5m2), `FN` one NaN pattern and no infinity (OCP e4m3fn of gfx950), `FNUZ` neither
infinity nor minus zero, whose pattern is the NaN (e4m3fnuz of gfx942).
Sources: OCP 8-bit Floating Point Specification 1.0; AMD Instinct MI300 ISA, section 7.3.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dualmla.emulator.jit import njit

IEEE, FN, FNUZ = 0, 1, 2

BF16 = (8, 7, 127, IEEE)
F16 = (5, 10, 15, IEEE)
E5M2 = (5, 2, 15, IEEE)
E4M3FN = (4, 3, 7, FN)
E4M3FNUZ = (4, 3, 8, FNUZ)
E5M2FNUZ = (5, 2, 16, FNUZ)


@njit
def decode(bits: Any, form: Any) -> Any:
    """The float64 a bit pattern of format `form` stands for."""
    exponent_bits, mantissa_bits, bias, kind = form
    sign = -1.0 if bits >> (exponent_bits + mantissa_bits) & 1 else 1.0
    exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = bits & ((1 << mantissa_bits) - 1)
    top = exponent == (1 << exponent_bits) - 1
    if kind == IEEE and top:
        return math.nan if mantissa else sign * math.inf
    if kind == FN and top and mantissa == (1 << mantissa_bits) - 1:
        return math.nan
    if kind == FNUZ and exponent == 0 and mantissa == 0 and sign < 0:
        return math.nan
    if exponent == 0:
        return sign * math.ldexp(float(mantissa), 1 - bias - mantissa_bits)
    return sign * math.ldexp(float(mantissa + (1 << mantissa_bits)), exponent - bias - mantissa_bits)


@njit
def encode(x: Any, form: Any) -> Any:
    """The pattern of `form` nearest to the float `x`, ties to even; what is too large becomes infinity, or NaN where
    the format has none (hardware with MODE.FP16_OVFL = 0)."""
    exponent_bits, mantissa_bits, bias, kind = form
    sign = (1 << (exponent_bits + mantissa_bits)) if math.copysign(1.0, x) < 0 else 0
    infinity = ((1 << exponent_bits) - 1) << mantissa_bits
    if kind == IEEE:
        nan, largest = infinity | 1 << (mantissa_bits - 1), infinity - 1
    elif kind == FN:
        nan, largest = infinity | ((1 << mantissa_bits) - 1), infinity | ((1 << mantissa_bits) - 2)
    else:
        nan, largest = 1 << (exponent_bits + mantissa_bits), infinity | ((1 << mantissa_bits) - 1)
    if math.isnan(x):
        return nan
    if math.isinf(x):
        return sign | infinity if kind == IEEE else nan
    magnitude = abs(float(x))
    if magnitude == 0.0:
        return 0 if kind == FNUZ else sign
    exponent = max(math.frexp(magnitude)[1] - 1, 1 - bias)
    units = int(np.rint(math.ldexp(magnitude, mantissa_bits - exponent)))
    code = ((exponent + bias - 1) << mantissa_bits) + units
    if code > largest:
        return sign | infinity if kind == IEEE else nan
    if code == 0 and kind == FNUZ:
        return 0
    return sign | code
