"""What tests share: small models, corpora and runs, ranks of real and virtual worlds, stand-ins, and programs that tests start."""
