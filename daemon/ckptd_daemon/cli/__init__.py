"""The command line: thin readers and writers around library and daemon. Nothing imports torch or numpy."""
