"""Names of element types, and the NumPy dtype that carries each."""

from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

#: name -> (module, attribute): ml_dtypes is imported only when one of its types is really asked for.
_CARRIERS = {
    "bf16": ("ml_dtypes", "bfloat16"),
    "e4m3": ("ml_dtypes", "float8_e4m3fn"),
    "f16": ("numpy", "float16"),
    "f32": ("numpy", "float32"),
    "f64": ("numpy", "float64"),
    "i32": ("numpy", "int32"),
    "i64": ("numpy", "int64"),
    "u8": ("numpy", "uint8"),
    "u32": ("numpy", "uint32"),
    "bool": ("numpy", "bool_"),
}
DTYPE_NAMES = frozenset(_CARRIERS)


def unknown_dtype(name: str) -> str:
    """Say that there is no such type, which there are, and which of them another library calls so."""
    known = f"unknown dtype {name!r}; known: {', '.join(sorted(_CARRIERS))}"
    meant = next((ours for ours, (_, theirs) in _CARRIERS.items() if name == theirs), None)
    return known if meant is None else f"{known}; did you mean {meant}?"


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype that carries ``name``; ValueError if there is no such type."""
    if name not in _CARRIERS:
        raise ValueError(unknown_dtype(name))
    module, attribute = _CARRIERS[name]
    dtype: np.dtype[Any] = np.dtype(getattr(import_module(module), attribute))
    return dtype
