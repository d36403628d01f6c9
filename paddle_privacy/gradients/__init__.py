"""Per-sample gradients: where parameters live, how they are captured, and in which form they are kept."""
