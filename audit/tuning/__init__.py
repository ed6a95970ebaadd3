"""Measured tables of thresholds: what one holds, which one a boot takes, and whether it still holds."""
