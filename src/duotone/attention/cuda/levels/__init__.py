"""Levels of blocks of K and V, searched on the device, and gains fitted to them."""
