"""The schema of an operator, from the signature of its contract."""

from collections.abc import Iterator
from keyword import iskeyword

from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.contract.signature import Param, ScalarParam, WeightParam
from kernel_muster.registry.errors import UsageError

NAMESPACE = "muster"
#: The one parameter of every operator besides its contract's: the name of the serving kernel.
SERVED_BY = "served_by"
# Inductor has a parameter with the first name, and takes ours by name. The dispatcher has one with the second name.
_TAKEN = ("kernel", "self", SERVED_BY)
#: The suffix of a weight's name for its form: the text with all but its tensors.
FORM = "_form"


def schema_of(contract: Contract) -> str:
    """Return ``name(Tensor x, float eps, Tensor(a!) out, *, str served_by="") -> ()``.

    A weight is two parameters, its tensors and its form. UsageError for names that no schema can hold.
    """
    names = [contract.name, *(name for param in contract.signature.params for name in names_of(param))]
    for name in names:
        if not name.isascii() or not name.isidentifier() or iskeyword(name) or name in _TAKEN:
            raise UsageError(f"contract {contract.name!r}: {name!r} cannot stand in a schema of torch")
    if doubled := sorted({name for name in names[1:] if names[1:].count(name) > 1}):
        raise UsageError(f"contract {contract.name!r}: two parameters of its operator are called {doubled[0]!r}")
    written = iter(range(len(names)))
    params = [one for param in contract.signature.params for one in _declared(param, written)]
    return f'{contract.name}({", ".join(params)}, *, str {SERVED_BY}="") -> ()'


def names_of(param: Param) -> tuple[str, ...]:
    """Return the names of an operator's arguments for a parameter of a contract."""
    return (param.name, param.name + FORM) if isinstance(param, WeightParam) else (param.name,)


def _declared(param: Param, written: Iterator[int]) -> Iterator[str]:
    if isinstance(param, WeightParam):
        yield f"Tensor[] {param.name}"
        yield f"str {param.name}{FORM}"
    elif isinstance(param, ScalarParam):
        kind = numpy_dtype(param.dtype).kind
        yield f"{'bool' if kind == 'b' else 'int' if kind in 'iu' else 'float'} {param.name}"
    else:
        # Each output is an alias set of its own: one letter, and a number from the 27th on.
        at = next(written) if param.role != "in" else 0
        alias = f"({chr(97 + at % 26)}{at // 26 or ''}!)" if param.role != "in" else ""
        yield f"Tensor{alias}{'?' if param.optional else ''} {param.name}"
