"""CUDA C++: sources, headers and options, and the compiler NVRTC."""
