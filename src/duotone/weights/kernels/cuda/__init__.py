"""CUDA C++ for integer products, compiled at the user's by NVRTC."""
