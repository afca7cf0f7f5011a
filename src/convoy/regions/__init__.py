"""What one kernel could do: proposals of regions, one pattern a file. No torch here."""

from __future__ import annotations

from convoy.regions.extract_subgraph import extract_subgraph
from convoy.regions.fused import fused_regions
from convoy.regions.propose import PATTERNS, propose
from convoy.regions.region import Region

__all__ = ["PATTERNS", "Region", "extract_subgraph", "fused_regions", "propose"]
