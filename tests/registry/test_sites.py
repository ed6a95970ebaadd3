"""Dispatch sites: the model line, not the helper's."""

import sys

import pytest
from kernel_muster.registry.selection.sites import is_marked, line_of, site_name, track_caller


def test_mark_stays_with_the_function_and_changes_nothing_else():
    @track_caller
    def helper(a, *, b=2):
        """Add."""
        return a + b

    assert helper(1) == 3
    assert helper(1, b=3) == 4
    assert helper.__doc__ == "Add."
    assert is_marked(helper.__code__)
    assert not is_marked(is_marked.__code__)


def test_mark_of_a_closure_keeps_its_variables():
    value = 5

    @track_caller
    def helper():
        return value

    assert helper() == 5


def test_mark_covers_comprehensions_and_lambdas_and_no_function_inside():
    @track_caller
    def helper():
        own = [sys._getframe(0).f_code for _ in "a"]
        own += (sys._getframe(0).f_code for _ in "a")
        own.append((lambda: sys._getframe(0).f_code)())

        def inner():
            return sys._getframe(0).f_code

        return own, inner()

    own, inner = helper()
    assert [is_marked(code) for code in own] == [True, True, True]
    assert not is_marked(inner)


@pytest.mark.parametrize("thing", [len, object(), type("C", (), {}), staticmethod(len)])
def test_mark_goes_on_functions_only(thing):
    with pytest.raises(TypeError, match="directly on a function"):
        track_caller(thing)


def test_function_that_mentions_the_mark_in_a_tuple_is_not_marked():
    def helper():
        return ("kernel_muster: dispatch sites skip this function", 1)

    assert not is_marked(helper.__code__)


def test_site_names_three_parts_of_the_path_line_and_function():
    frame = sys._getframe()
    line = frame.f_lineno + 1
    site = site_name(frame.f_code, frame.f_lasti)
    assert site.startswith("tests/registry/test_sites.py:")
    assert site.endswith(" in test_site_names_three_parts_of_the_path_line_and_function")
    assert abs(int(site.split(":")[1].split()[0]) - line) <= 1


def test_line_of_an_instruction_outside_the_code_is_the_functions_own():
    assert line_of(line_of.__code__, 10**6) == line_of.__code__.co_firstlineno
