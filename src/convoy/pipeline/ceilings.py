"""A device's ceilings for the report of a net, measured before anything of that net takes memory."""

from __future__ import annotations

from typing import Final

import torch

from convoy.measurement import Peaks, peaks
from convoy.measurement.device.memory_limit import refresh_memory_limit
from convoy.measurement.failure import is_out_of_memory
from convoy.program.recording import forget_library_workspaces
from convoy.target import Target

NO_CEILINGS: Final = (
    "there was no room to measure the ceilings of the device: no layer has a floor, and there is no roofline"
)
"""What a plan says that was made without them."""


def measure_ceilings(target: Target) -> Peaks | None:
    """The ceilings, or None where there is no room for that; what it took is given back either way.

    Beside a tuned net there may be none: of 606 MiB for all of ResNet-50 at batch 32 its plan left 50 (H100, commit c829457).
    """
    refresh_memory_limit()
    try:
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
    """What to tell of a plan whose report lacks them."""
    return [NO_CEILINGS] if found is None else []
