"""The client's way to whoever writes: slots filled, messages exchanged, failures surfaced. No thread."""
