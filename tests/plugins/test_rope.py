"""Rope and its companions on the host: limits, axes, slices, refusals, and the launch with norms and append."""

import numpy as np
import pytest
from host_kernels import BF16, empty, gaussian, ints, kernel, same
from kernel_muster.registry.errors import ContractError


def test_rope_at_position_zero_changes_nothing_and_a_quarter_turn_swaps_the_halves():
    theta = 1.0  # every frequency is 1
    q = np.array([[[3, 5, 7, 9, 11]]] * 2, BF16)
    k = q.copy()
    kernel("rope_forward")(q, k, ints(0, 11), 4, theta)  # 11 radians are 3.5 * pi and 0.0044 more
    assert q[0].tolist() == k[0].tolist() == [[3, 5, 7, 9, 11]]
    turned = (np.array([3, 5]) + 1j * np.array([7, 9])) * np.exp(11j)
    assert np.allclose(q[1, 0, :4].astype(float), [*turned.real, *turned.imag], rtol=2.0**-8)
    assert q[1, 0, 4] == 11


def test_rope_keeps_the_product_of_query_and_key_under_a_common_shift():
    rng = np.random.default_rng(0)
    q, k = gaussian(rng, 1, 1, 64), gaussian(rng, 1, 1, 64)
    products = []
    for shift in (0, 1000, 200_000):
        turned_q, turned_k = q.copy(), k.copy()
        kernel("rope_forward")(turned_q, np.zeros((1, 0, 64), BF16), ints(shift + 7), 64, 1e7)
        kernel("rope_forward")(np.zeros((1, 0, 64), BF16), turned_k, ints(shift), 64, 1e7)
        products.append(float(turned_q.astype(float).ravel() @ turned_k.astype(float).ravel()))
    bound = 2 * 2.0**-8 * np.abs(q.astype(float)).ravel() @ np.abs(k.astype(float)).ravel() * 2
    assert np.ptp(products) < bound


@pytest.mark.parametrize("sections", [(11, 11, 10), (32, 0, 0), (12, 10, 10)])
def test_mrope_with_equal_positions_has_the_bits_of_rope(sections):
    rng = np.random.default_rng(1)
    q, k, positions = gaussian(rng, 5, 3, 80), gaussian(rng, 5, 1, 80), ints(0, 1, 77, 5000, 262143)
    plain_q, plain_k = q.copy(), k.copy()
    kernel("rope_forward")(plain_q, plain_k, positions, 64, 1e7)
    kernel("rope_mrope_interleaved")(q, k, np.stack([positions] * 3), *sections, 64, 1e7)
    assert same(q, plain_q)
    assert same(k, plain_k)


def test_mrope_turns_each_frequency_by_its_axis():
    """With all-one halves only the frequencies of one axis move when that axis alone does."""
    expected = {0: [0, 3, 6, 7], 1: [1, 4], 2: [2, 5]}  # 8 frequencies as t h w t h w t t
    for axis, moved in expected.items():
        q, positions = np.ones((1, 1, 16), BF16), np.zeros((3, 1), np.int32)
        positions[axis] = 1
        kernel("rope_mrope_interleaved")(q, np.ones((1, 1, 16), BF16), positions, 4, 2, 2, 16, 1.5)
        assert np.flatnonzero(q[0, 0, :8] != 1).tolist() == moved


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ((4, 2, 1), r"rotary_dim/2 is 8, expected at most section_t \+ section_h \+ section_w = 7"),
        ((4, 2, 3), r"section_t \+ section_h \+ section_w is 9, expected at most rotary_dim/2 = 8"),
        ((2, 4, 2), r"3\*section_h - 1 is 11, expected at most rotary_dim/2 = 8"),
        ((3, 2, 3), r"3\*section_w is 9, expected at most rotary_dim/2 = 8"),
    ],
)
def test_mrope_with_sections_that_do_not_fit_is_refused(sections, message):
    q = np.ones((1, 1, 16), BF16)
    with pytest.raises(ContractError, match=message):
        kernel("rope_mrope_interleaved")(q, q.copy(), np.zeros((3, 1), np.int32), *sections, 16, 1e4)


def test_rope_at_a_negative_position_is_refused_and_changes_nothing():
    q = np.ones((2, 1, 4), BF16)
    with pytest.raises(ContractError, match=r"rope_forward: positions\[1\] is -1, expected 0 or more"):
        kernel("rope_forward")(q, q.copy(), ints(5, -1), 4, 1e4)
    with pytest.raises(ContractError, match=r"positions\[2, 1\] is -3, expected 0 or more"):
        kernel("rope_mrope_interleaved")(q, q.copy(), ints(0, 0, 0, 0, 0, -3).reshape(3, 2), 2, 0, 0, 4, 1e4)
    assert (q == 1).all()


def test_rope_over_more_than_the_head_is_refused():
    q = np.ones((1, 1, 4), BF16)
    with pytest.raises(ContractError, match="rotary_dim is 6, expected at most D = 4"):
        kernel("rope_forward")(q, q.copy(), ints(0), 6, 1e4)


def test_rope_on_a_slice_of_a_fused_projection_changes_that_slice_only():
    rng = np.random.default_rng(2)
    fused = gaussian(rng, 3, 4, 8)
    before = fused.copy()
    kernel("rope_forward")(fused[:, :2], fused[:, 2:3], ints(1, 2, 3), 8, 1e4)
    q, k = before[:, :2].copy(), before[:, 2:3].copy()
    kernel("rope_forward")(q, k, ints(1, 2, 3), 8, 1e4)
    assert same(fused, np.concatenate([q, k, before[:, 3:]], axis=1))


def fused_arguments(positions, slots):
    """Return what qk_norm_rope_append takes: two rows of two and one heads, and pages of four tokens."""
    rng = np.random.default_rng(2)
    q, k, v = gaussian(rng, 2, 2, 8), gaussian(rng, 2, 1, 8), gaussian(rng, 2, 1, 8)
    weights, caches = (gaussian(rng, 8), gaussian(rng, 8)), [np.full((3, 4, 1, 8), 7, BF16) for _ in "kv"]
    return q, k, v, *weights, ints(*positions), ints(*slots), 1e-6, 1.0, 4, 1e4, *caches


def gapped(x):
    """Return the values as rows of an array that has others between them."""
    wide = np.full((2 * x.shape[0], *x.shape[1:]), 3, BF16)
    wide[::2] = x
    return wide[::2]


@pytest.mark.parametrize("laid", [lambda x: x, gapped, lambda x: x[::-1].copy()[::-1]])
def test_norm_turn_append_is_the_three_after_each_other(laid):
    q, k, v, q_weight, k_weight, positions, slots, eps, offset, rotary, theta, *caches = fused_arguments(
        (3, 9), (5, -1)
    )
    q, k, v = map(laid, (q, k, v))
    normed = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        out = empty(*x.shape)
        kernel("rms_norm")(x.reshape(-1, 8), weight, eps, offset, out.reshape(-1, 8))
        normed.append(out)
    kernel("rope_forward")(*normed, positions, rotary, theta)
    expected = [cache.copy() for cache in caches]
    kernel("kv_cache_append")(normed[1], v, slots, *expected)
    kernel("qk_norm_rope_append")(q, k, v, q_weight, k_weight, positions, slots, eps, offset, rotary, theta, *caches)
    assert same(q, normed[0])
    assert all(same(*pair) for pair in zip(caches, expected, strict=True))


@pytest.mark.parametrize(("positions", "slots", "what"), [
    ((1, -2), (0, 1), r"positions\[1\] is -2"), ((1, 2), (0, 12), r"slots\[1\] is 12"),
    ((1, 2), (5, 5), r"slots\[0, 1\] are both 5"),
])  # fmt: skip
def test_norm_turn_append_of_what_its_parts_refuse_changes_nothing(positions, slots, what):
    arguments = fused_arguments(positions, slots)
    before = arguments[0].copy()
    with pytest.raises(ContractError, match=rf"rope::qk_norm_rope_append: {what}"):
        kernel("qk_norm_rope_append")(*arguments)
    assert same(arguments[0], before)
    assert all((cache == 7).all() for cache in arguments[-2:])
