"""The daemon: the series of checkpoints and the process that owns it."""
