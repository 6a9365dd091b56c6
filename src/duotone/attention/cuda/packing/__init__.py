"""Parts that all packing kernels share: tiles of dense K and V, codes, words."""
