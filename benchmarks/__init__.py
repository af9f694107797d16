"""What is measured, and how; README.md has the results. Every program runs from the root of the repository: python -m benchmarks.NAME."""
