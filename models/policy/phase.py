"""Phases of serving, as policy sees them."""

from typing import Literal, get_args

Phase = Literal["prefill", "decode", "verify"]
PHASES: tuple[Phase, ...] = get_args(Phase)
