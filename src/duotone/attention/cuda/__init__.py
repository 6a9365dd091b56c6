"""Decode attention in CUDA C++, compiled by NVRTC on the user's machine, without nvcc."""
