"""One run as the daemon owns it: its catalogue, retention, quarantine and policy."""
