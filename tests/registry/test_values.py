from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, replace
from functools import cached_property

import pytest
from kernel_muster.registry.values import frozen


@frozen
class Value:
    name: str
    rows: int = 1
    notes: tuple[str, ...] = field(default=(), compare=False)
    effects: dict[str, int] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def twice(self) -> int:
        return 2 * self.rows


@frozen(kw_only=True)
class Named:
    name: str


@frozen
class Other:
    name: str
    rows: int = 1


@frozen
class More(Value):
    extra: int = 0


@dataclass(frozen=True)
class Standard:
    name: str
    rows: int = 1


def test_frozen_is_compared_and_hashed_by_its_compared_fields_and_its_class():
    assert Value("a", 2, ("note",)) == Value("a", 2)
    assert hash(Value("a", 2, ("note",))) == hash(Value("a", 2))
    assert Value("a") != Value("b")
    assert Value("a") != Other("a")
    assert Value("a") != ("a", 1)
    assert More("a") != Value("a")
    assert More("a", extra=1) != More("a", extra=2)
    assert len({Value("a"), Value("a"), Value("b")}) == 2


def test_frozen_with_one_compared_field_is_not_equal_to_its_value():
    assert Named(name="a") == Named(name="a")
    assert Named(name="a") != "a"


@pytest.mark.parametrize("name", ["name", "rows", "new"])
def test_frozen_fields_cannot_be_set_added_or_deleted(name):
    value, standard = Value("a"), Standard("a")
    for one in (value, standard):
        with pytest.raises(FrozenInstanceError):
            setattr(one, name, 3)
    with pytest.raises(FrozenInstanceError):
        delattr(value, name)
    assert value == Value("a")


def test_frozen_keeps_what_a_cached_property_found():
    value = Value("a", 3)
    assert value.twice == value.twice == 6
    assert value == Value("a", 3)


def test_frozen_is_a_dataclass_to_the_standard_library():
    assert [item.name for item in fields(Value)] == ["name", "rows", "notes", "effects"]
    assert replace(Value("a"), rows=5) == Value("a", 5)
    assert asdict(Value("a")) == {"name": "a", "rows": 1, "notes": (), "effects": {}}
    assert repr(More("a", 2)) == "More(name='a', rows=2, notes=(), extra=0)"
    assert repr(Other("a")) == repr(Standard("a")).replace("Standard", "Other")


def test_frozen_kw_only_takes_no_positional_argument():
    with pytest.raises(TypeError, match="positional"):
        Named("a")


def test_frozen_with_an_unhashable_field_cannot_be_hashed():
    with pytest.raises(TypeError, match="unhashable"):
        hash(Other("a", []))


def test_frozen_leaves_a_class_its_own_methods():
    @frozen
    class Shown:
        name: str

        def __repr__(self) -> str:
            return f"<{self.name}>"

    assert repr(Shown("a")) == "<a>"
