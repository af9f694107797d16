"""The files that --log-jsonl writes: their history, followed while they grow, and drawn in a terminal."""
