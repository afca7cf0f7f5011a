"""`torch.compile(model, backend="convoy")`: graphs that Dynamo caught, tuned in their first call.

See docs/how-to/torch-compile.md.
"""

from __future__ import annotations

from convoy.torch_compile.backend import dynamo_backend

__all__ = ["dynamo_backend"]
