"""A snapshot in flight: the captured values, the descriptor that tells of them, and the slot they lie in. No torch."""
