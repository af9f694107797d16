"""The number of places of pinned memory in each direction of the host link (no torch)."""

SLOTS = 2  # one is copied while the host works on the other
