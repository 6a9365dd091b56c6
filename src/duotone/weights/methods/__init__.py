"""Methods that choose codes and scales of a linear: ranges, rounding, recipes."""
