"""Attention of prompts in tiles of rows: bits of a row, distance from row-by-row attention, and untouched memory.

A context of up to 256 tokens is one part in any launch, and a part of a longer one has 128 at least (launch.py).
"""

from itertools import pairwise
from types import ModuleType

import kernel_muster as km
import ml_dtypes
import numpy as np
import pytest
from kernel_muster.audit.proof.proofs import device_memory, prove
from kernel_muster.models.build import build_from_dims
from kernel_muster.models.decode import DecodeEngine
from kernel_muster.models.manifest_dims import model_dims
from kernel_muster.models.memory.state import StateSizes
from kernel_muster.models.reduced import reduced
from kernel_muster.models.weights.random_weights import RandomWeights
from kernel_muster.plugins.prefill_paged import launch

pytestmark = pytest.mark.gpu

BF16 = ml_dtypes.bfloat16
MMA, ROWS = "prefill_paged_attn_mma", "prefill_paged_attn"
PAGE = 16
# Heads of the models, and odd ones: query heads, key heads, values.
HEADS = [(16, 2, 256), (24, 4, 256), (32, 4, 128), (10, 2, 256), (3, 3, 128)]
# A weight in one BF16 errs by at most 2^-9. Errors of a context's weights are independent. A result rounds as usual.
NEAR = 2.0**-8


@pytest.fixture(scope="module")
def kernels(cache):
    """Return the registry, and in it the tiles by mma.sync as a kernel of their own, which no architecture replaces."""
    spec = km.KernelSpec(key="acme::mma", contract=MMA, archs=("sm_80+",), backend=launch.PREFILL_MMA)
    module = ModuleType("acme")
    module.muster_kernels = km.hookimpl(lambda: [spec], specname="muster_kernels")
    return km.open_registry("cuda", levers={"MUSTER_CACHE_DIR": cache}, local_plugins={"acme": module})


@pytest.fixture(params=[("prefill_paged", MMA), ("acme", "mma")], ids=["chosen", "mma_sync"])
def tiles(request, kernels):
    """Return the kernel that this device gets, then the one that any device may get."""
    return kernels.kernel(*request.param)


class Prompts:
    """Sequences ``(rows, tokens before them)`` with a cache of their own; what no token has is NaN."""

    def __init__(self, heads, sequences, seed=0):
        rng = np.random.default_rng(seed)
        q_heads, self.key_heads, self.head_dim = heads
        self.counts = [rows for rows, _ in sequences]
        self.lengths = np.array([rows + before for rows, before in sequences], np.int32)
        self.q = rng.standard_normal((sum(self.counts), q_heads, self.head_dim)).astype(BF16)
        pages = [-(-int(length) // PAGE) for length in self.lengths]
        order = rng.permutation(sum(pages)).astype(np.int32)
        self.table = np.full((len(sequences), max(pages)), -1, np.int32)
        self.k, self.v = (np.full((sum(pages) + 1, PAGE, self.key_heads, self.head_dim), np.nan, BF16) for _ in "kv")
        for at, (count, length) in enumerate(zip(pages, self.lengths.tolist(), strict=True)):
            own, order = order[:count], order[count:]
            self.table[at, :count] = own
            for cache in (self.k, self.v):
                tokens = np.full((count * PAGE, self.key_heads, self.head_dim), np.nan, BF16)
                tokens[:length] = rng.standard_normal((length, self.key_heads, self.head_dim)).astype(BF16)
                cache[own] = tokens.reshape(count, PAGE, self.key_heads, self.head_dim)

    def rows_of(self, sequence):
        start = sum(self.counts[:sequence])
        return slice(start, start + self.counts[sequence])

    def attend(self, kernel, **changes):
        """Return rows ``[M, Hq, D]`` as numbers; ``changes`` replace arguments."""
        given = {
            "q": self.q, "k_cache": self.k, "v_cache": self.v, "block_table": self.table,
            "cu_rows": np.cumsum([0, *self.counts], dtype=np.int32), "context_lens": self.lengths, **changes,
        }  # fmt: skip
        memory, out = device_memory(0), np.full(given["q"].shape, np.nan, BF16)
        arrays = {name: memory.to(value) for name, value in {**given, "out": out}.items()}
        kernel(**arrays, scale=self.head_dim**-0.5)
        memory.wait()
        return memory.back(arrays["out"])


def relative(found, expected):
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("heads", HEADS)
def test_tiles_are_as_near_the_rows_as_rounded_weights_let_them_be(kernels, tiles, heads):
    prompts = Prompts(heads, [(200, 0), (37, 1003), (1, 700), (90, 64)])
    found, rows = prompts.attend(tiles), prompts.attend(kernels.kernel("prefill_paged", ROWS))
    for sequence in range(4):
        own = prompts.rows_of(sequence)
        assert relative(found[own], rows[own]) <= NEAR
    assert np.isfinite(found.astype(np.float32)).all()


@pytest.mark.parametrize("heads", HEADS)
def test_row_has_its_bits_alone_among_others_and_wherever_the_prompt_is_cut(tiles, heads):
    prompts = Prompts(heads, [(77, 0), (5, 130), (64, 51), (1, 0)])
    together = prompts.attend(tiles)
    for sequence in range(4):
        own, table = prompts.rows_of(sequence), prompts.table[sequence : sequence + 1]
        length = prompts.lengths[sequence : sequence + 1]
        rows = own.stop - own.start
        cuts = sorted({0, 1, rows // 3, rows - 1, rows})
        parts = []
        for start, stop in pairwise(cuts):
            ends = np.array([0, stop - start], np.int32)
            q = prompts.q[own.start + start : own.start + stop]
            parts.append(
                prompts.attend(tiles, q=q, block_table=table, cu_rows=ends, context_lens=length - (rows - stop))
            )
        assert np.concatenate(parts).tobytes() == together[own].tobytes()


@pytest.mark.parametrize("heads", HEADS)
def test_contexts_in_parts_are_as_near_the_rows_as_rounded_weights_let_them_be(kernels, tiles, heads):
    for sequences in ([(40, 4000)], [(1, 700), (20, 2500), (0, 900), (9, 0), (3, 300)]):
        prompts = Prompts(heads, sequences)
        found, rows = prompts.attend(tiles), prompts.attend(kernels.kernel("prefill_paged", ROWS))
        for sequence, (count, _) in enumerate(sequences):
            own = prompts.rows_of(sequence)
            assert count == 0 or relative(found[own], rows[own]) <= NEAR


@pytest.mark.parametrize(
    ("heads", "rows", "before", "same"),
    [*((heads, 30, 220, 250) for heads in HEADS), ((3, 3, 128), 300, 60, 128), ((2, 2, 256), 300, 60, 128)],
)
def test_row_that_sees_one_part_has_the_bits_that_it_has_where_there_are_no_parts(tiles, heads, rows, before, same):
    prompts = Prompts(heads, [(rows, before), (7, 0), (3, 1500)])
    count = same - before  # rows that see a context of one part
    alone = {
        "q": prompts.q[:count], "block_table": prompts.table[:1, : -(-same // PAGE)],
        "cu_rows": np.array([0, count], np.int32), "context_lens": np.array([same], np.int32),
    }  # fmt: skip
    assert prompts.attend(tiles, **alone).tobytes() == prompts.attend(tiles)[:count].tobytes()


@pytest.mark.parametrize("heads", HEADS)
def test_row_that_sees_several_parts_has_bits_that_no_other_sequence_changes(tiles, heads):
    prompts = Prompts(heads, [(20, 90), (40, 2990), (16, 1200)])
    own, whole = prompts.rows_of(1), prompts.attend(tiles)
    assert prompts.attend(tiles).tobytes() == whole.tobytes()
    for lengths, ends in (([20, 3030, 16], [0, 20, 60, 76]), ([110, 3030, 0], [0, 20, 60, 60])):
        others = {"context_lens": np.array(lengths, np.int32), "cu_rows": np.array(ends, np.int32)}
        assert prompts.attend(tiles, **others)[own].tobytes() == whole[own].tobytes()


@pytest.mark.parametrize(("before", "page"), [(30, 5), (1500, 97)])
def test_rows_that_see_a_page_that_is_not_there_are_zeros(tiles, before, page):
    prompts = Prompts((16, 2, 256), [(100, before), (40, 0)])
    whole = prompts.attend(tiles)
    for wrong in (-1, len(prompts.k), 2**31 - 1):
        table = prompts.table.copy()
        table[0, page] = wrong
        found = prompts.attend(tiles, block_table=table)
        seeing = page * PAGE - before  # the first row whose own token lies in that page
        assert not found[seeing:100].astype(np.float32).any()
        assert found[:seeing].tobytes() == whole[:seeing].tobytes()
        assert found[100:].tobytes() == whole[100:].tobytes()


@pytest.mark.parametrize("before", [20, 900])
def test_rows_without_a_context_are_zeros(tiles, before):
    prompts = Prompts((24, 4, 256), [(50, before), (40, 0)])
    whole = prompts.attend(tiles)
    for wrong in (49, 0, -5, prompts.table.shape[1] * PAGE + 50, 2**31 - 1):  # shorter than the rows, beyond the pages
        found = prompts.attend(tiles, context_lens=np.array([wrong, 40], np.int32))
        assert not found[:50].astype(np.float32).any()
        assert found[50:].tobytes() == whole[50:].tobytes()


def test_rows_of_a_head_size_without_tiles_are_refused(tiles):
    with pytest.raises(km.ContractError, match="head_dim is 64, expected 128 or 256"):
        Prompts((4, 2, 64), [(3, 0)]).attend(tiles)


def test_tiles_by_mma_sync_keep_their_contract_where_others_are_chosen(kernels):
    handle = kernels.kernel("acme", "mma")
    results = list(prove(handle, device_memory(0), lambda key: None))
    assert [f"{finding.code}: {finding.why}" for result in results for finding in result.findings] == []
    assert len(results) == len(handle.contract.cases)


def test_prompt_read_in_tiles_gives_the_logits_of_one_read_row_by_row_within_its_roundings(cache):
    def first_logits(**levers):
        given = {"MUSTER_CACHE_DIR": cache, **levers}
        with km.boot("qwen3.6-27b", target="cuda", levers=given, stage="loaded") as boot:
            model = build_from_dims(reduced(model_dims(boot.manifest)), boot.kernels, RandomWeights(1), 128)
        with DecodeEngine(model, StateSizes(2, 32, 16), 256) as engine:
            prompts = [[(7 * at) % 500 for at in range(100)], [3, 1, 4]]
            found = engine.generate(prompts, 1, keep_logits=True)
        return [rows[0].astype(np.float64) for rows in found.logits]

    in_tiles, by_rows = first_logits(), first_logits(MUSTER_NO_PREFILL_MMA="1")
    assert in_tiles[0].tobytes() != by_rows[0].tobytes()
    # test_decode.py counts the roundings of four layers. Tiles add one in each attention layer.
    for found, expected in zip(in_tiles, by_rows, strict=True):
        assert relative(found, expected) <= (12 * 4 + 2 + 1) * 2.0**-8
