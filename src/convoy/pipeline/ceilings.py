"""A device's roofline ceilings, measured before the net needs memory."""

from __future__ import annotations

from typing import Final

import torch

from convoy.measurement import Peaks, peaks
from convoy.measurement.device.memory_limit import refresh_memory_limit
from convoy.measurement.failure import is_out_of_memory
from convoy.program.recording import forget_library_workspaces
from convoy.target import Target
from convoy.tuning_profile import phase

NO_CEILINGS: Final = "the roofline ceilings could not be measured for lack of memory: the report has no floors"
"""Note of a plan that was made without them."""


def measure_ceilings(target: Target) -> Peaks | None:
    """The ceilings; None if measuring them does not fit in memory. The memory is freed in any case.

    A tuned net may leave too little: of 606 MiB, ResNet-50 at batch 32 left 50 (H100, commit c829457).
    """
    refresh_memory_limit()
    try:
        with phase("roofline ceilings"):
            found = peaks(target)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        found = None
    if target.device == "cuda":
        forget_library_workspaces()
        torch.cuda.empty_cache()
    return found


def ceiling_notes(found: Peaks | None) -> list[str]:
    """Notes of a plan whose report has no ceilings."""
    return [NO_CEILINGS] if found is None else []
