"""Vector comparisons: one mask bit a lane, written to VCC or an SGPR pair. See `registry` for the signature letters."""

from __future__ import annotations

import math
from typing import Any

from dualmla.emulator.registry import vector

SIGN_64 = -(2**63)


@vector("f f -> m", "V_CMP_LT_F32")
@vector("i i -> m", "V_CMP_LT_I32")
@vector("u u -> m", "V_CMP_LT_U32")
@vector("q q -> m", "V_CMP_LT_I64")
def less(a: Any, b: Any) -> Any:
    return a < b


@vector("f f -> m", "V_CMP_LE_F32")
@vector("i i -> m", "V_CMP_LE_I32")
@vector("u u -> m", "V_CMP_LE_U32")
@vector("q q -> m", "V_CMP_LE_I64")
def less_equal(a: Any, b: Any) -> Any:
    return a <= b


@vector("f f -> m", "V_CMP_GT_F32")
@vector("i i -> m", "V_CMP_GT_I32")
@vector("u u -> m", "V_CMP_GT_U32")
@vector("q q -> m", "V_CMP_GT_I64")
def greater(a: Any, b: Any) -> Any:
    return a > b


@vector("f f -> m", "V_CMP_GE_F32")
@vector("i i -> m", "V_CMP_GE_I32")
@vector("u u -> m", "V_CMP_GE_U32")
@vector("q q -> m", "V_CMP_GE_I64")
def greater_equal(a: Any, b: Any) -> Any:
    return a >= b


@vector("f f -> m", "V_CMP_EQ_F32")
@vector("u u -> m", "V_CMP_EQ_I32", "V_CMP_EQ_U32")
@vector("q q -> m", "V_CMP_EQ_I64", "V_CMP_EQ_U64")
def equal(a: Any, b: Any) -> Any:
    return a == b


@vector("f f -> m", "V_CMP_NEQ_F32")
@vector("u u -> m", "V_CMP_NE_I32", "V_CMP_NE_U32")
@vector("q q -> m", "V_CMP_NE_I64", "V_CMP_NE_U64")
def not_equal(a: Any, b: Any) -> Any:
    return a != b


@vector("q q -> m", "V_CMP_LT_U64")
def less_unsigned_64(a: Any, b: Any) -> Any:
    return (a ^ SIGN_64) < (b ^ SIGN_64)


@vector("q q -> m", "V_CMP_LE_U64")
def less_equal_unsigned_64(a: Any, b: Any) -> Any:
    return (a ^ SIGN_64) <= (b ^ SIGN_64)


@vector("q q -> m", "V_CMP_GT_U64")
def greater_unsigned_64(a: Any, b: Any) -> Any:
    return (a ^ SIGN_64) > (b ^ SIGN_64)


@vector("q q -> m", "V_CMP_GE_U64")
def greater_equal_unsigned_64(a: Any, b: Any) -> Any:
    return (a ^ SIGN_64) >= (b ^ SIGN_64)


@vector("f f -> m", "V_CMP_LG_F32")
def less_or_greater(a: Any, b: Any) -> Any:
    return (a < b) or (a > b)


@vector("f f -> m", "V_CMP_O_F32")
def ordered(a: Any, b: Any) -> Any:
    return not (math.isnan(a) or math.isnan(b))


@vector("f f -> m", "V_CMP_U_F32")
def unordered(a: Any, b: Any) -> Any:
    return math.isnan(a) or math.isnan(b)


@vector("f f -> m", "V_CMP_NLT_F32")
def not_less(a: Any, b: Any) -> Any:
    return not a < b


@vector("f f -> m", "V_CMP_NLE_F32")
def not_less_equal(a: Any, b: Any) -> Any:
    return not a <= b


@vector("f f -> m", "V_CMP_NGT_F32")
def not_greater(a: Any, b: Any) -> Any:
    return not a > b


@vector("f f -> m", "V_CMP_NGE_F32")
def not_greater_equal(a: Any, b: Any) -> Any:
    return not a >= b


@vector("f f -> m", "V_CMP_NLG_F32")
def not_less_or_greater(a: Any, b: Any) -> Any:
    return not ((a < b) or (a > b))
