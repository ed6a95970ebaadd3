"""What CUDA families share: headers, and weight layouts that several of them read."""

from pathlib import Path

INCLUDE_DIR = Path(__file__).parent
