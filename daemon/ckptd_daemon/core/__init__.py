"""The daemon process: one loop, one thread for the disk, the life of every snapshot."""
