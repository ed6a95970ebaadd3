"""Keys: module::func, both of small letters, digits and underscores."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_muster.registry.keys import KernelKey, KeyNames, did_you_mean, near, parse_key


@pytest.mark.parametrize("text", ["a::b", "w4a16::w4a16_gemm_t_k64", "a1_::b_2"])
def test_key_reads_back_what_it_is_written_as(text):
    assert str(parse_key(text)) == text
    assert parse_key(text).problem is None


@pytest.mark.parametrize(
    "text",
    ["", "a", "a:b", "a::", "::b", "A::b", "a::B", "1a::b", "_a::b", "a::b::c", "a::b\n", "a ::b", "a-b::c", None, 3],
)
def test_text_that_is_no_key_is_refused(text):
    with pytest.raises(ValueError, match="is not a key"):
        parse_key(text)


@given(st.text(max_size=20))
def test_any_text_is_a_key_that_reads_back_or_a_value_error(text):
    try:
        key = parse_key(text)
    except ValueError:
        return
    assert str(key) == text


@pytest.mark.parametrize("parts", [("A", "b"), ("a", ""), (1, "b"), ("a", None)])
def test_key_made_by_hand_says_its_problem(parts):
    assert "does not match" in KernelKey(*parts).problem


def test_near_names_do_not_depend_on_the_order_of_the_known_ones():
    known = ["moe::sort", "moe::silu_mul", "silu::silu_mul"]
    assert near("moe::silu_mull", known) == near("moe::silu_mull", reversed(known)) != []
    assert did_you_mean("zzz", known) == ""


def test_prefix_that_all_names_share_does_not_make_them_near():
    known = ["MUSTER_SIZE", "MUSTER_SLOW"]
    assert near("MUSTER_SIZ", known, prefix="MUSTER_") == ["MUSTER_SIZE"]
    assert near("MUSTER_QRX", known, prefix="MUSTER_") == []


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("mul", ["acme::mul", "moe::mul"]),
        ("acme.silu_mul", ["acme::silu_mul"]),
        ("Silu_Mul", ["acme::silu_mul"]),
        ("silu_mull", ["acme::silu_mul"]),
        ("moe", ["moe::mul"]),
        ("zzz", []),
        ("", []),
        ("::", []),
    ],
)
def test_key_may_be_meant_by_what_is_no_key(text, meant):
    known = [KernelKey("acme", "mul"), KernelKey("moe", "mul"), KernelKey("acme", "silu_mul")]
    assert KeyNames(known).meant(text) == KeyNames(reversed(known)).meant(text) == meant
