"""Calls that mypy and pyright must refuse; both report a comment here that hides nothing. This script is never run."""

from __future__ import annotations

import torch
from torch import nn

import convoy

MODEL, X = nn.Conv2d(3, 4, 3), torch.zeros(1, 3, 8, 8)

convoy.Settings(effort="fast")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
convoy.Settings(numerics="double")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
convoy.Settings(only_engines="aten")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
convoy.Settings(speed="most")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
convoy.Settings().effort = convoy.Effort.NONE  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
convoy.optimize("resnet18", (X,))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
convoy.optimize(MODEL, (X,), settings={"effort": "none"})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
convoy.load(MODEL)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
convoy.training_step(MODEL, nn.functional.mse_loss)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
convoy.fastest(MODEL)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
