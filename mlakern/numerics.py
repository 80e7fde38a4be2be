"""Numbers that references, runtime and manifest agree on."""

from __future__ import annotations

import math

E4M3_MAX = 448.0
# A probability may reach 2^(rescale_threshold + p_prescale_log2) before it is rounded to e4m3.
MAX_P_LOG2 = math.log2(E4M3_MAX)
DEFAULT_RESCALE_THRESHOLD = 8.0  # log2 units that the running maximum may lag
# What a base-2 LSE is multiplied by to be to each base.
LSE_FACTORS = {"2": 1.0, "e": math.log(2.0)}
