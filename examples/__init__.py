"""Programs that use the engine without the training script. They run from the root of the repository: python -m examples.NAME."""
