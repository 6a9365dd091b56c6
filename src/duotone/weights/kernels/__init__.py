"""Linear kernels: static quantization, online Hadamard, integer products; each with a reference."""
