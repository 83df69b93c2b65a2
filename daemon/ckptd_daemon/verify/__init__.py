"""The verifier, a process of its own, and the daemon's handle on it."""
