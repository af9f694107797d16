"""What tools/plan_run.py computes and prints."""
