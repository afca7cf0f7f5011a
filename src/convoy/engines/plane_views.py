"""Three-dimensional convolutions that a 2-D convolution computes, on views of the same memory (`Conv3dProblem.as_2d`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from convoy.problem import Conv3dProblem, ConvProblem, Problem
from convoy.regions import Region


@dataclass(frozen=True, slots=True)
class PlaneViews:
    """How 5-D tensors of a three-dimensional convolution are seen as 4-D ones.

    Attributes:
        volume: the convolution, in the layout of its tensors.
    """

    volume: Conv3dProblem

    @staticmethod
    def of(problem: Problem, region: Region) -> PlaneViews | None:
        """The views for a step whose problem is the 2-D form of one of its region's; None for any other step."""
        if not isinstance(problem, ConvProblem):
            return None
        volumes = [one for one in region.problems if isinstance(one, Conv3dProblem)]
        return next((PlaneViews(one) for one in volumes if one.as_2d() == problem), None)

    def weight(self, tensor: torch.Tensor) -> torch.Tensor:
        """[k, c, t, r, s] as [k, c, r, s] of slices, or [k, c, t, 1]."""
        return tensor.squeeze(2) if self.volume.slices_are_images else tensor.flatten(3)

    def image(self, tensor: torch.Tensor) -> torch.Tensor:
        """[n, c, d, h, w] as [n * d, c, h, w], or [n, c, d, h * w]."""
        if self.volume.slices_are_images:
            n, c, d, h, w = tensor.shape
            return tensor.transpose(1, 2).view(n * d, c, h, w)
        return tensor.view(*tensor.shape[:3], -1)

    def weight_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Inverse of `weight`."""
        return tensor.unsqueeze(2 if self.volume.slices_are_images else 4)

    def volume_of(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Inverse of `image`, for volumes of this shape."""
        if self.volume.slices_are_images:
            return tensor.view(shape[0], shape[2], shape[1], *shape[3:]).transpose(1, 2)
        return tensor.view(shape)

    def args(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """A launch's arguments as the 2-D problem has them."""
        direction, dynamic = self.volume.direction, self.volume.dynamic_weight
        at = 1 if direction == "dgrad" or (direction == "fprop" and dynamic) else -1
        return tuple(
            tensor if tensor.dim() != 5 else self.weight(tensor) if index == at else self.image(tensor)
            for index, tensor in enumerate(tensors)
        )

    def results(self, tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """A launch's results as the 2-D problem has them."""
        see = self.weight if self.volume.direction == "wgrad" else self.image
        return [tensor if tensor is None or tensor.dim() != 5 else see(tensor) for tensor in tensors]

    def made(self, tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Results that an executable allocated, as the three-dimensional problem has them."""
        spec = self.volume.x_spec if self.volume.direction == "dgrad" else self.volume.y_spec

        def seen(tensor: torch.Tensor) -> torch.Tensor:
            return self.weight_of(tensor) if self.volume.direction == "wgrad" else self.volume_of(tensor, spec.shape)

        return [tensor if tensor is None or tensor.dim() != 4 else seen(tensor) for tensor in tensors]
