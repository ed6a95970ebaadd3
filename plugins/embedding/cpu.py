"""The host kernel of the embedding family."""

from kernel_muster.plugins._reference import Array, check_indices


def gather(table: Array, ids: Array, out: Array) -> None:
    """Write ``out[m] = table[ids[m]]``: ``table [V, H]`` BF16, ``ids [M]`` int32, ``out [M, H]`` BF16.

    An id outside ``0 <= id < V`` raises ContractError before any write.
    """
    check_indices("embedding::gather", "ids", ids, table.shape[0])
    for row, index in enumerate(ids):
        out[row] = table[index]
