"""Shared by CUDA families: headers, weight layouts, helpers of launchers."""

from pathlib import Path

INCLUDE_DIR = Path(__file__).parent
