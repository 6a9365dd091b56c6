"""Facts of models, and checks before any work is done."""
