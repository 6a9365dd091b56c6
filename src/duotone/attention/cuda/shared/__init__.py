"""Parts that all decode kernels share: work, launches, the ring, merging, the sources."""
