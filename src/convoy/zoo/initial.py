"""A random initialisation that a numerical check can see through: unit-scale activations, live batch norms."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from convoy.zoo.image_size import ImageSize, sides

NEAR_ZERO = 1e-4
"""Parameters that are constant and no larger than this switch a branch off (zero-initialised residuals, layer scales)."""


def initialise(model: nn.Module) -> None:
    """Draw all parameters anew from torch's global generator.

    Convolutions and linear layers are drawn after He et al., "Delving deep into rectifiers" (ICCV 2015), which keeps the
    scale of activations through ReLUs, where PyTorch's own default shrinks them by about 0.4 a layer: a deep net's
    output would be its last bias, and an error in an early layer would not show. Batch norms get scales and shifts that
    are not 1 and 0. Parameters that would switch a branch off are drawn from [0.1, 0.3].
    """
    done: set[int] = set()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear, nn.ConvTranspose2d, nn.Conv1d, nn.Conv3d)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                if module.bias is not None:
                    module.bias.normal_(0.0, 0.1)
            elif isinstance(module, _BatchNorm) and module.affine:
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0.0, 0.2)
            else:
                continue
            done.update(map(id, module.parameters(recurse=False)))
        for parameter in model.parameters():
            if id(parameter) in done or parameter.numel() == 0 or not parameter.is_floating_point():
                continue
            if float(parameter.abs().max()) <= NEAR_ZERO and float(parameter.max() - parameter.min()) == 0:
                parameter.uniform_(0.1, 0.3)


def calibrate(model: nn.Module, size: ImageSize) -> None:
    """Set every batch norm's running statistics to those of one random image, layer by layer, in one forward pass.

    Args:
        model: a model of one RGB input; models without batch norm are left as they are.
        size: height and width of the image, pixels.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not norms:
        return
    hooks = [norm.register_forward_pre_hook(_set_statistics) for norm in norms]
    model.eval()
    try:
        with torch.no_grad():
            model(torch.randn(clip_shape(model, 1, 3, size)))
    finally:
        for hook in hooks:
            hook.remove()


def clip_shape(model: nn.Module, batch: int, channels: int, size: ImageSize) -> tuple[int, ...]:
    """Shape of an input: [n, c, h, w], or [n, c, 16, h, w] where the first convolution is over time too."""
    first = next((m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Conv3d))), None)
    frames = (16,) if isinstance(first, nn.Conv3d) else ()
    return (batch, channels, *frames, *sides(size))


def _set_statistics(norm: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    x = args[0]
    if not isinstance(norm, _BatchNorm) or norm.running_mean is None or norm.running_var is None:
        return
    dims = [d for d in range(x.dim()) if d != 1]
    if x.numel() // x.shape[1] < 2:
        return  # one value a channel has no variance: the defaults, mean 0 and variance 1, stay
    variance, mean = torch.var_mean(x, dim=dims, correction=0)
    norm.running_mean.copy_(mean)
    # A channel that is constant on this image must not be blown up by 1 / sqrt(eps) on others.
    norm.running_var.copy_(variance.clamp_min(float(variance.mean()) * 0.01 + 1e-6))
