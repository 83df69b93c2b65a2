"""A checkpoint and a series on disk: written, proved, listed. The only place that orders writes. No torch."""
