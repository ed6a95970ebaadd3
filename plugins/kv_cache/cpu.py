"""The host kernel of the kv_cache family."""

from kernel_muster.plugins._reference import Array
from kernel_muster.plugins._sequences import PADDING, check_slots


def kv_cache_append(k: Array, v: Array, slots: Array, k_cache: Array, v_cache: Array) -> None:
    """Copy rows ``k, v [M, Hk, D]`` BF16 to their slots of ``k_cache, v_cache [P, B, Hk, D]`` BF16.

    P pages hold B tokens each; slot ``page * B + offset`` of ``slots [M]`` int32 is a token's place, -1 a row that is
    not kept. A slot outside the cache, or one that two rows name, raises ContractError before any write.
    """
    pages, page_size = k_cache.shape[:2]
    check_slots("kv_cache::kv_cache_append", slots, pages * page_size)
    for row, slot in enumerate(slots.tolist()):
        if slot != PADDING:
            page, offset = divmod(slot, page_size)
            k_cache[page, offset] = k[row]
            v_cache[page, offset] = v[row]
