"""Contracts: what several kernels promise alike."""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import Any

import numpy as np
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.contract.signature import ScalarParam, Signature, TensorParam, WeightParam, evaluate_dim
from kernel_muster.registry.keys import key_problem
from kernel_muster.registry.values import frozen

Arguments = dict[str, Any]
Run = Callable[[Arguments], Mapping[str, Any]]  # one launch: arguments to outputs by name
ByRows = Callable[[Run, Arguments, Mapping[str, int]], Mapping[str, Any]]


@frozen
class Tolerance:
    """How far a result may lie from the reference: ``|y - ref| <= absolute + relative * |ref|``.

    ``derivation`` says where the two numbers come from; ``exact`` results have both at zero.
    """

    relative: float
    absolute: float
    derivation: str

    def problems(self) -> list[str]:
        """Say what is malformed: a bound that allows anything, or nothing, or comes from nowhere."""
        bounds = (("relative", self.relative), ("absolute", self.absolute))
        found = [f"tolerance: {name} is {bound!r}, expected a number from 0 on" for name, bound in bounds
                 if not 0 <= bound < math.inf]  # fmt: skip
        if not isinstance(self.derivation, str) or not self.derivation.strip():
            found.append(f"tolerance: derivation is {self.derivation!r}, expected where the two numbers come from")
        return found


@frozen
class Case:
    """One set of dimensions a kernel is proven on, and what it is there for.

    ``tolerance`` replaces the contract's where the dimensions ask for another bound.
    """

    name: str
    dims: Mapping[str, int]
    scalars: Mapping[str, float] = field(default_factory=dict)
    tolerance: Tolerance | None = None


@frozen
class Contract:
    """A typed signature with its reference, cases and tolerance.

    ``reference(arguments, dims)`` is plain NumPy in float64: it returns every output by name and changes nothing. An
    output of a floating type is float64, one of integers or bool is that.
    ``inputs(dims, rng)`` may replace the random arguments that :meth:`arguments` makes, for instance with indices
    that must be in range.
    ``output_tolerances`` hold instead of ``tolerance`` for the outputs they name, for instance an exact state.
    ``by_rows`` serves claims of bit identity with kernels of other parameters: by the name of their contract,
    ``by_rows[name](run, arguments, dims)`` makes these outputs with ``run(arguments)`` of such a kernel. Where the
    parameters are the same it is not needed: then such a kernel runs on as many rows (M) at a time as it takes.
    ``open_keys`` are keys that models ask for and anybody may provide, under this contract alone.
    """

    name: str
    summary: str
    signature: Signature
    reference: Callable[[Arguments, Mapping[str, int]], Mapping[str, Any]]
    cases: tuple[Case, ...]
    tolerance: Tolerance
    inputs: "Callable[[Mapping[str, int], np.random.Generator], Arguments] | None" = None
    output_tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    by_rows: Mapping[str, ByRows] = field(default_factory=dict)
    open_keys: tuple[str, ...] = ()

    def tolerance_of(self, output: str, case: Case | None = None) -> Tolerance:
        """Return how far an output may lie from the reference, in a case."""
        general = case.tolerance if case is not None and case.tolerance is not None else self.tolerance
        return self.output_tolerances.get(output, general)

    def problems(self) -> list[str]:
        """Say what is malformed, all at once."""
        found = [] if isinstance(self.name, str) and self.name else [f"name is {self.name!r}, expected text"]
        malformed = self.signature.problems()
        found += malformed or self._case_problems()
        if not callable(self.reference):
            found.append("reference is not callable")
        if not (self.inputs is None or callable(self.inputs)):
            found.append(f"inputs is {self.inputs!r}, expected a function or None")
        outputs = {param.name for param in self.signature.outputs}
        found.extend(
            f"tolerance for {name!r}, which is no output" for name in self.output_tolerances if name not in outputs
        )
        found.extend(f"by_rows of {name!r} is not callable" for name, how in self.by_rows.items() if not callable(how))
        found.extend(f"open_keys: {problem}" for key in self.open_keys if (problem := key_problem(key)))
        for tolerance in (self.tolerance, *self.output_tolerances.values()):
            found += tolerance.problems()
        return found

    def _case_problems(self) -> list[str]:
        if not isinstance(self.cases, tuple) or not all(isinstance(case, Case) for case in self.cases):
            return [f"cases is {self.cases!r}, expected a tuple of Case"]
        if not self.cases:
            return ["no test case"]
        malformed = [case for case in self.cases if not _is_well_formed(case)]
        if malformed:
            return [f"case {case.name!r}: expected a name and a mapping of dimensions" for case in malformed]
        wrong = [problem for case in self.cases if case.tolerance is not None for problem in case.tolerance.problems()]
        if wrong:
            return wrong
        names = [case.name for case in self.cases]
        wrong = [f"two cases are called {name!r}" for name in dict.fromkeys(names) if names.count(name) > 1]
        if wrong := [*wrong, *self._size_problems()]:
            return wrong
        if all(self._is_empty(case) for case in self.cases):
            return ["every test case is empty, so that nothing would be launched and nothing proven"]
        return []

    def _size_problems(self) -> list[str]:
        """Say which sizes and scalars cases lack, or give for nothing; what ``inputs`` reads and makes it knows."""
        scalars = {param.name for param in self.signature.params if isinstance(param, ScalarParam)}
        needed = self.signature.symbols
        cases: dict[str, list[str]] = {}
        sizes = [
            f"case {case.name}: {name} is {case.dims[name]!r}, expected an integer from 0 on"
            for case in self.cases
            for name in case.dims
            if name in needed and not _is_size(case.dims[name])
        ]
        for case in self.cases:
            wrong = [f"the scalar {name}, which no parameter is called" for name in case.scalars if name not in scalars]
            if self.inputs is None:
                given = case.dims.keys() | case.scalars.keys()
                wrong += [f"no size for {name}" for name in sorted(needed - case.dims.keys() - scalars)]
                wrong += [f"a size for {n}, which no shape has" for n in case.dims if n not in needed | scalars]
                wrong += [f"no value for the scalar {name}" for name in sorted(scalars - given)]
            for what in wrong:
                cases.setdefault(what, []).append(case.name)
        return sizes + [
            f"case {names[0]} gives {what}" if len(names) == 1 else f"cases {', '.join(names)} give {what}"
            for what, names in cases.items()
        ]

    def _is_empty(self, case: Case) -> bool:
        """Whether no output has an element; a shape that the case does not say is not known to be empty."""
        try:
            shapes = [[evaluate_dim(dim, case.dims) for dim in param.shape] for param in self.signature.outputs]
        except (KeyError, ValueError, SyntaxError):
            return False
        return all(0 in shape for shape in shapes)

    def expected(self, case: Case, given: Arguments) -> tuple[dict[str, Any], list[str]]:
        """Return what the reference gives of a case's arguments, and what is wrong with it.

        The outputs are copies: those of a reference may be views of its arguments, or memory that it uses again.
        """
        own = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in given.items()}
        before = _contents(own)
        made = self.reference(own, case.dims)
        written = {param.name for param in self.signature.outputs}
        found = [
            f"the reference changes its input {name}"
            for name, content in _contents(own).items()
            if content != before.get(name) and name not in written
        ]
        if not isinstance(made, Mapping):
            return {}, [*found, f"the reference returns {type(made).__name__}, expected every output by name"]
        wanted = [param.name for param in self.signature.outputs if given[param.name] is not None]
        outputs = {name: np.array(made[name]) for name in wanted if name in made}
        gives = ", ".join(map(str, made)) or "nothing"
        lacking = [f"the reference gives no output {name} (it gives {gives})" for name in wanted if name not in made]
        return outputs, [*found, *lacking, *_wrong_outputs(given, outputs)]

    def case_problems(self, case: Case, dims: Mapping[str, int]) -> list[str]:
        """Say which sizes ``inputs`` made otherwise than the case says; ``dims`` are those of its arguments."""
        return [
            f"inputs gives {name} = {size}, the case says {case.dims[name]}"
            for name, size in dims.items()
            if case.dims.get(name, size) != size
        ]

    def arguments(self, case: Case, rng: "np.random.Generator") -> Arguments:
        """Make the arguments of a case: Gaussian inputs, outputs poisoned so that an unwritten element shows.

        Scalars have the values of their declared types: a kernel and the reference are given the same.
        ValueError where neither the case nor ``inputs`` says what a scalar is.
        """
        made: Arguments = self.inputs(case.dims, rng) if self.inputs else {}
        for param in self.signature.params:
            if param.name in made:
                continue
            if isinstance(param, ScalarParam):
                made[param.name] = _scalar_of(case, param)
            elif isinstance(param, WeightParam):
                made[param.name] = random_weight(param, case.dims, rng)
            else:
                made[param.name] = random_tensor(param, case.dims, rng)
        return made


def _scalar_of(case: Case, param: ScalarParam) -> float:
    for given in (case.scalars, case.dims):
        if param.name in given:
            value = given[param.name]
            return numpy_dtype(param.dtype).type(value).item() if isinstance(value, float) else value
    raise ValueError(f"the scalar {param.name} is in neither scalars nor dims")


def _contents(arguments: Arguments) -> dict[str, int]:
    """Return a checksum of each array, those of weights too."""
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    for name, value in arguments.items():
        parts = {} if name in arrays else getattr(value, "__dict__", {})
        arrays.update((f"{name}.{part}", array) for part, array in parts.items() if isinstance(array, np.ndarray))
    return {name: zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data) for name, array in arrays.items()}


def _wrong_outputs(given: Arguments, expected: Mapping[str, Any]) -> Iterator[str]:
    """Say which outputs a reference gives in another shape, or in a type that rounds as a kernel may."""
    for name, output in expected.items():
        wanted = given[name]
        if output.shape != wanted.shape:
            yield f"{name} has shape {output.shape}, expected {wanted.shape}"
        elif _is_whole(wanted.dtype):
            if not _is_whole(output.dtype):
                yield f"the reference returns {name} as {output.dtype}, expected integers or bool, as in {wanted.dtype}"
        elif output.dtype != np.float64:
            yield f"the reference returns {name} as {output.dtype}, expected float64"


def _is_whole(dtype: Any) -> bool:
    """Whether a type rounds nothing: FP64 to FP16 do, and the types of ml_dtypes, which NumPy calls void."""
    return dtype.kind in "iub"


def _is_well_formed(case: Case) -> bool:
    return isinstance(case.name, str) and isinstance(case.dims, Mapping) and isinstance(case.scalars, Mapping)


def _is_size(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 0)


# What no kernel writes: a quiet NaN with these bits of payload, by the size of the type.
_PAYLOADS = {2: 0x15, 4: 0x15A5A5, 8: 0x15A5A5A5A5A5}


def poison_of(dtype: Any) -> Any:
    """Return what an unwritten element shows: a NaN that arithmetic does not give, the largest integer, or True."""
    if dtype.kind in "iub":
        return True if dtype.kind == "b" else np.iinfo(dtype).max
    nan = np.array(np.nan, dtype)
    if dtype.itemsize in _PAYLOADS:
        nan.view(f"u{dtype.itemsize}")[...] |= _PAYLOADS[dtype.itemsize]
    return nan


def _sizes(param: TensorParam | WeightParam, dims: Mapping[str, int]) -> tuple[int, ...]:
    try:
        return tuple(evaluate_dim(dim, dims) for dim in param.shape)
    except KeyError as error:
        raise ValueError(f"{param.name}: no size is given for {error.args[0]}") from None


def random_tensor(param: TensorParam, dims: Mapping[str, int], rng: "np.random.Generator") -> Any:
    """Return a Gaussian input or a poisoned output (NaN, or the largest integer) for one parameter."""
    shape = _sizes(param, dims)
    dtype = numpy_dtype(param.dtype.split("|")[0])
    if param.role == "out":
        return np.full(shape, poison_of(dtype), dtype)
    if dtype.kind in "iub":
        raise ValueError(f"{param.name}: a contract with integer inputs must say how to make them (inputs=...)")
    return rng.standard_normal(shape).astype(dtype)


def random_weight(param: WeightParam, dims: Mapping[str, int], rng: "np.random.Generator") -> Any:
    """Return a logical weight of Gaussian values: NVFP4 row-major, or BF16."""
    from kernel_muster.registry.contract import nvfp4
    from kernel_muster.registry.contract.weights import Bf16Weight

    *lead, rows, columns = _sizes(param, dims)
    values = rng.standard_normal((int(np.prod(lead, dtype=int)), rows, columns)).astype(np.float32)
    if param.quant == "bf16":
        return Bf16Weight(values.reshape(*lead, rows, columns).astype(numpy_dtype("bf16")))
    quantized = [nvfp4.quantize(matrix) for matrix in values]
    return nvfp4.Nvfp4Weight(
        np.array([w.packed for w in quantized]).reshape(*lead, rows, columns // 2),
        np.array([w.block_scale for w in quantized]).reshape(*lead, rows, columns // nvfp4.GROUP),
        np.array([w.global_scale_decode for w in quantized], np.float32).reshape(lead),
    )
