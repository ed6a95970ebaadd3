"""Devices and architectures: what a kernel is compiled for and runs on."""
