"""The bytes of a checkpoint's files: archives, tables, records. Pure: no I/O, no torch."""
