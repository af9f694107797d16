"""The kinds of memory that a plan tells apart."""

from __future__ import annotations

WEIGHTS, GRADIENTS, OPTIMIZER, COPY = "weights", "gradients", "optimizer state", "copy of weights"
OUTER = "outer weights, momentum and copies"
STATES = (WEIGHTS, GRADIENTS, OPTIMIZER, COPY, OUTER)
GATHERED, PAYLOADS, OTHER = "gathered units", "payload buffers", "other tensors"
KEPT_INPUTS, ACTIVATIONS = "inputs of recomputed chunks", "activations"
ON_DEVICE = (*STATES, GATHERED, PAYLOADS, OTHER, KEPT_INPUTS, ACTIVATIONS)  # in the order in which plans list them
CODED = "values that a codec makes beside payloads"  # counted apart; a plan lists the most of them among other tensors
# On a host that is not the device.
MAIN_WEIGHTS, MOMENTS, MIRRORS, PINNED = "main weights", "Adam's moments", "mirrors of kept copies", "pinned staging"
ON_HOST = (MAIN_WEIGHTS, MOMENTS, MIRRORS, PINNED, OTHER, KEPT_INPUTS)
