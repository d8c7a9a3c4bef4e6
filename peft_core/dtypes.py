"""Element types: their names, how they combine, what sums are kept in, and their codes in safetensors files.

Types are plain ``numpy.dtype`` objects; bfloat16 and the float8 types come from ml_dtypes. NumPy's own promotion is
never relied on: it knows no rule for bfloat16 with float16, and turns float32 arrays into float64 behind one's back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

float64 = np.dtype(np.float64)
float32 = np.dtype(np.float32)
float16 = np.dtype(np.float16)
bfloat16 = np.dtype(ml_dtypes.bfloat16)
float8_e4m3fn = np.dtype(ml_dtypes.float8_e4m3fn)
float8_e5m2 = np.dtype(ml_dtypes.float8_e5m2)
int64 = np.dtype(np.int64)
int32 = np.dtype(np.int32)
int16 = np.dtype(np.int16)
int8 = np.dtype(np.int8)
uint8 = np.dtype(np.uint8)
bool_ = np.dtype(np.bool_)

SAFETENSORS_CODES: dict[str, np.dtype] = {
    "F64": float64,
    "F32": float32,
    "F16": float16,
    "BF16": bfloat16,
    "F8_E4M3": float8_e4m3fn,
    "F8_E5M2": float8_e5m2,
    "I64": int64,
    "I32": int32,
    "I16": int16,
    "I8": int8,
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": uint8,
    "BOOL": bool_,
}
_CODE_OF = {dtype: code for code, dtype in SAFETENSORS_CODES.items()}
_NAMES = {str(dtype): dtype for dtype in _CODE_OF}
_ALIASES = {"float": "float32", "half": "float16", "double": "float64", "long": "int64", "int": "int32",
            "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # fmt: skip
_FLOATS = {float64, float32, float16, bfloat16}
_HALF = {float16, bfloat16}


def as_dtype(spec: Any) -> np.dtype:
    """The dtype meant by a name ("bfloat16", "bf16", "torch.float16"), a NumPy dtype or a scalar type.

    Raises ValueError for a name that is not known.
    """
    if isinstance(spec, str):
        name = spec.removeprefix("torch.")
        name = _ALIASES.get(name, name)
        if name not in _NAMES:
            raise ValueError(f"dtype {spec!r} is not known; expected one of {', '.join(sorted(_NAMES))}.")
        return _NAMES[name]
    return np.dtype(spec)


def dtype_name(dtype: Any) -> str:
    """The plain name: "bfloat16", "float32", "int64"."""
    return str(np.dtype(dtype))


def code_of(dtype: Any) -> str:
    """The type code in a safetensors header.  Raises ValueError where the format has none."""
    dtype = np.dtype(dtype)
    if dtype not in _CODE_OF:
        raise ValueError(f"dtype {dtype} cannot be stored in a safetensors file; expected one of {list(_NAMES)}.")
    return _CODE_OF[dtype]


def is_float(dtype: Any) -> bool:
    """True for the types that can carry a gradient: float64, float32, float16, bfloat16."""
    return np.dtype(dtype) in _FLOATS


def is_half(dtype: Any) -> bool:
    """True for float16 and bfloat16."""
    return np.dtype(dtype) in _HALF


class FloatLimits(NamedTuple):
    """What ``finfo`` tells about a floating dtype, as Python floats."""

    bits: int
    eps: float
    max: float
    min: float
    tiny: float
    smallest_normal: float
    resolution: float
    dtype: str


def finfo(dtype: Any = float32) -> FloatLimits:
    """The limits of a floating dtype.  Raises TypeError for another."""
    dtype = as_dtype(dtype)
    if not is_float(dtype):
        raise TypeError(f"finfo of {dtype}; expected a floating dtype. For integers there is iinfo.")
    info = ml_dtypes.finfo(dtype)
    tiny = float(info.smallest_normal)
    return FloatLimits(int(info.bits), float(info.eps), float(info.max), float(info.min), tiny, tiny,
                       float(info.resolution), dtype_name(dtype))  # fmt: skip


def promote(*dtypes: Any) -> np.dtype:
    """The type that an operation on these types is computed and returned in.

    Equal types stay; two different half types give float32, as does a half type with float32; a float beats an integer.
    """
    kinds = list(dict.fromkeys(np.dtype(d) for d in dtypes))
    floats = [d for d in kinds if d in _FLOATS]
    if not floats:
        return np.result_type(*kinds)
    if len(floats) == 1:
        return floats[0]
    return float64 if float64 in floats else float32


def accumulate_dtype(dtype: Any) -> np.dtype:
    """The type that sums over ``dtype`` are kept in: float32 for half types, else itself."""
    return float32 if is_half(dtype) else np.dtype(dtype)
