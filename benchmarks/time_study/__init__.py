"""The parts of benchmarks/time_to_loss.py."""
