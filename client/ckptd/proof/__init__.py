"""The proof that a user's own job resumes bit for bit: run it, kill it, resume it, compare, name what differs.

The caller's process imports no torch and runs none of the job: each run is a fresh interpreter (`child`), which
writes what it saw as JSON lines (`trace`). `comparing` is pure.
"""
