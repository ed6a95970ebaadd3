"""The values of a planner in a prepared launch, without a driver."""

import ctypes

import numpy as np
import pytest
from kernel_muster.registry.backends.request import EntryPoint
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.launch.prepared import _value

ENTRY = EntryPoint("scale", ("ptr",))
ENDS = {"i8": (-128, 127), "u8": (0, 255), "i16": (-32768, 32767), "u16": (0, 65535), "i32": (-(2**31), 2**31 - 1),
        "u32": (0, 2**32 - 1), "i64": (-(2**63), 2**63 - 1), "u64": (0, 2**64 - 1), "ptr": (0, 2**64 - 1)}  # fmt: skip


@pytest.mark.parametrize("kind", ENDS)
def test_integer_is_passed_as_it_is_or_refused_and_never_wrapped(kind):
    least, most = ENDS[kind]
    assert [_value("acme::scale", ENTRY, kind, value).value for value in (least, most)] == [least, most]
    for value in (least - 1, most + 1):
        said = f"^acme::scale: scale is given {value} for a parameter of type {kind}, expected an integer from {least} "
        with pytest.raises(ContractError, match=f"{said}to {most}$"):
            _value("acme::scale", ENTRY, kind, value)


@pytest.mark.parametrize("value", [1.5, 2.0, "3", None], ids=repr)
def test_what_is_no_integer_is_refused_by_name(value):
    with pytest.raises(ContractError, match=f"scale is given {value!r} for a parameter of type i32"):
        _value("acme::scale", ENTRY, "i32", value)


@pytest.mark.parametrize("value", [np.int64(7), np.uint8(7), True], ids=repr)
def test_integers_of_numpy_and_flags_are_integers(value):
    made = _value("acme::scale", ENTRY, "i32", value)
    assert (type(made), made.value) == (ctypes.c_int32, int(value))
