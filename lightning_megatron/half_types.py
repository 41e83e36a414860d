"""Half-precision dtypes."""

from __future__ import annotations

import torch

#: Floating-point dtypes of 16 bits.
HALF_TYPES = (torch.float16, torch.bfloat16)
