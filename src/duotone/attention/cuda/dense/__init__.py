"""Windows that are not packed: decoding, and appending and moving their tokens."""
