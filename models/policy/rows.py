"""Row counts: the captured batch sizes of decode, and the rows of a verify pass."""

from kernel_muster.registry.errors import UsageError

CAPTURED_BATCH_SIZES = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def padded_rows(rows: int) -> int:
    """Return the captured batch size for M rows. One row stays one. UsageError beyond the largest size."""
    if rows == 1:
        return 1
    for size in CAPTURED_BATCH_SIZES:
        if 1 <= rows <= size:
            return size
    raise UsageError(f"{rows} rows: expected 1 to {CAPTURED_BATCH_SIZES[-1]}, the largest captured batch size")


def verify_rows(drafts: int) -> int:
    """Return the rows of a sequence in a verify pass: each draft, and the token before them (17 rows with 16)."""
    return _at_least(drafts, "drafts") + 1


def committed_rows(accepted: int) -> int:
    """Return the number of rows that reach the drafter's context after an accept. Plain decode accepts none."""
    return accepted + 1 if accepted >= 0 else _at_least(accepted, "accepted")


def _at_least(value: int, name: str) -> int:
    if value < 1:
        raise UsageError(f"{name} is {value}, expected at least 1")
    return value
