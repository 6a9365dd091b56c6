"""Linear kernels in Triton: products, activations to codes, online Hadamard."""
