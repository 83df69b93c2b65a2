"""The command line: thin readers and writers around library and daemon. Nothing here imports torch or numpy."""
