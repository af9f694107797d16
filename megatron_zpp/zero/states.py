"""The names of the states of a parameter, as checkpoints have them (no torch).

WEIGHT: the fp32 main weight. MOMENTS: of Adam. KEPT_WEIGHT: the copy, in the working dtype, to which differences of weights are added.
"""

from __future__ import annotations

WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
KEPT_WEIGHT = "kept_weight"
