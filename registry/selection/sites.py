"""Dispatch sites: the line of model code that asked, not the helper that passed the question on."""

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import TypeVar

_Function = TypeVar("_Function", bound=Callable[..., object])

# The mark travels with the code object, so that no table of functions has to live anywhere.
_MARK = "kernel_muster: dispatch sites skip this function"


def track_caller(function: _Function) -> _Function:
    """Mark a helper that looks kernels up for its caller: the caller's line becomes the dispatch site."""
    if not isinstance(function, FunctionType):
        raise TypeError(f"track_caller goes directly on a function, not on {type(function).__name__}")
    function.__code__ = _marked(function.__code__)
    return function


def _marked(code: CodeType) -> CodeType:
    """Mark a function's code, and that of its comprehensions and lambdas: before Python 3.12 each has a frame."""
    inner = (
        _marked(constant) if isinstance(constant, CodeType) and constant.co_name.startswith("<") else constant
        for constant in code.co_consts
    )
    return code.replace(co_consts=(*inner, _MARK))


def is_marked(code: CodeType) -> bool:
    """Whether a function's code carries the mark."""
    return any(type(constant) is str and constant == _MARK for constant in code.co_consts)


def line_of(code: CodeType, instruction: int) -> int:
    """Return the line of a byte offset (``frame.f_lasti``) in a function's code."""
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return line
    return code.co_firstlineno


def site_name(code: CodeType, instruction: int) -> str:
    """Return ``path/to/file.py:12 in function``: the last three parts of the path, the same on every machine."""
    parts = code.co_filename.replace("\\", "/").split("/")
    return f"{'/'.join(parts[-3:])}:{line_of(code, instruction)} in {code.co_qualname}"
