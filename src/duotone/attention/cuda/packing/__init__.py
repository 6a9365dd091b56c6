"""Common parts of all packing kernels: tiles of dense K and V, codes, words."""
