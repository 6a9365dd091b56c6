"""Decode attention in CUDA C++, compiled at the user's by NVRTC. Nothing here needs nvcc."""
