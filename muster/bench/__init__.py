"""Measuring kernels on the device at hand, beside the peers that are installed."""
