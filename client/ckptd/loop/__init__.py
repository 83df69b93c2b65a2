"""What a training loop holds beside the client: cadence, counters, the loader that resumes in mid-epoch."""
