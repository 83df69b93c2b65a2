"""Live objects to captured values and back: the only place that touches torch and numpy, with `ckptd.loop`."""
