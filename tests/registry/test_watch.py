"""Calls that are watched, and exceptions as text."""

from kernel_muster.registry.watch import cause_chain, located, watched


def raising(error):
    def call():
        raise error

    return call


def test_watched_call_gives_its_value_or_its_exception():
    assert watched(lambda: 3, 5, "x").value == 3
    error = watched(raising(ValueError("no")), 5, "x").error
    assert cause_chain(error).startswith("ValueError: no (at ")


def test_exception_is_told_on_one_line_with_its_place():
    error = watched(raising(ValueError("no\n  way")), 5, "x").error
    assert located(error).startswith(f"ValueError: no way (at {__file__}:")
    assert located(ValueError()) == "ValueError"


def test_cause_chain_of_a_circle_ends():
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert cause_chain(one).count("ValueError") == 2
