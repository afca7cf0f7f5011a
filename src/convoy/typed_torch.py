"""Functions of torch and safetensors whose annotations are missing or incomplete, with the types that Convoy relies on.

Each function calls exactly one function of the library. Code that is checked strictly calls these instead.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
from numpy.typing import NDArray
from torch import nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class GpuProperties(Protocol):
    """The result of `torch.cuda.get_device_properties` for a GPU."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    pci_domain_id: int
    pci_bus_id: int
    pci_device_id: int


def gpu_properties(index: int | torch.device | None = None) -> GpuProperties:
    """Properties of one of torch's GPUs, by default of the current one."""
    return cast("Any", torch.cuda).get_device_properties(index)


def set_memory_fraction(fraction: float) -> None:
    """Let this process hold at most a fraction, 0..1, of the current GPU's memory."""
    cast("Any", torch.cuda).set_per_process_memory_fraction(fraction)


def l2_norm(tensor: torch.Tensor) -> float:
    """The L2 norm of all elements."""
    return float(cast("Any", tensor).norm())


def split(tensor: torch.Tensor, sizes: int | Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Parts of a tensor along its first dimension: of one size, where the last part may be smaller, or of the given sizes."""
    return cast("Any", tensor).split(sizes)


def from_numpy(array: NDArray[Any]) -> torch.Tensor:
    """A CPU tensor that shares the array's memory."""
    return cast("Any", torch).from_numpy(array)


def backward(loss: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
    """Run `loss.backward(gradient)`; the gradient is needed where the loss is not a single number."""
    cast("Any", loss).backward(gradient)


def is_functional(tensor: torch.Tensor) -> bool:
    """Whether a tensor is wrapped for functionalization."""
    return cast("Any", torch)._is_functional_tensor(tensor)


def is_functorch_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor is wrapped by a transform of `torch.func`."""
    return cast("Any", torch._C)._functorch.is_functorch_wrapped_tensor(tensor)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside a DistributedDataParallel; any other module itself."""
    return cast("nn.Module", model.module) if isinstance(model, nn.parallel.DistributedDataParallel) else model


def process_group(model: nn.Module) -> Any:
    """The process group of a DistributedDataParallel; None for any other module."""
    return cast("Any", model).process_group if isinstance(model, nn.parallel.DistributedDataParallel) else None


def foreach_copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, with few launches."""
    cast("Any", torch)._foreach_copy_(list(targets), list(sources))


def foreach_add(targets: Sequence[torch.Tensor], terms: Sequence[torch.Tensor] | float) -> None:
    """Add to each target its term, or one number to all, in place, with few launches."""
    cast("Any", torch)._foreach_add_(list(targets), terms if isinstance(terms, int | float) else list(terms))


def foreach_multiply(targets: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply each target by a number, in place, with few launches."""
    cast("Any", torch)._foreach_mul_(list(targets), factor)


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each module of a model once, the model itself first, with its path."""
    return cast("Iterator[tuple[str, nn.Module]]", model.named_modules())


def in_memory_format(model: ModuleT, memory_format: torch.memory_format) -> ModuleT:
    """The model itself, after its 4-D parameters and buffers were converted to a memory format."""
    return cast("Any", model).to(memory_format=memory_format)


def torch_compile(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`torch.compile` with the given options."""
    return cast("Any", torch).compile(model, **options)


@contextmanager
def seeded_rng(seed: int) -> Generator[None]:
    """Inside, the CPU's random generator starts from a seed; afterwards it is as before."""
    with cast("Any", torch).random.fork_rng(devices=[]):
        cast("Any", torch).manual_seed(seed)
        yield


def barrier() -> None:
    """Wait for all processes of the default process group."""
    cast("Any", torch).distributed.barrier()


def all_reduce(tensor: torch.Tensor, operation: Any = None, **options: Any) -> Any:
    """Reduce a tensor over all processes, in place, by default by a sum; returns a handle with `async_op=True`."""
    distributed = cast("Any", torch).distributed
    return distributed.all_reduce(tensor, distributed.ReduceOp.SUM if operation is None else operation, **options)


def new_group(ranks: Sequence[int], **options: Any) -> Any:
    """A new process group of some ranks; the options are those of `torch.distributed.new_group`."""
    return cast("Any", torch).distributed.new_group(ranks, **options)


def all_gather(tensors: list[torch.Tensor], tensor: torch.Tensor, group: Any = None) -> None:
    """Fill `tensors` with the tensor of each process of a group."""
    cast("Any", torch).distributed.all_gather(tensors, tensor, group=group)


def all_to_all(output: torch.Tensor, given: torch.Tensor, **options: Any) -> Any:
    """Send each process of a group its equal part of a flat tensor; returns a handle with `async_op=True`."""
    return cast("Any", torch).distributed.all_to_all_single(output, given, **options)


def all_gather_flat(output: torch.Tensor, tensor: torch.Tensor, group: Any = None) -> None:
    """Fill `output` with the flat tensor of each process of a group, one behind the other."""
    distributed = cast("Any", torch).distributed
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor  # before torch 2.13
    gather(output, tensor, group=group)


def to_list(tensor: torch.Tensor) -> list[Any]:
    """A tensor's values as nested lists; one of one dimension gives a list of numbers."""
    return cast("Any", tensor).tolist()


def load_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file, on the CPU, by name; raises `safetensors.SafetensorError` for a damaged file."""
    import safetensors.torch

    return cast("Any", safetensors.torch).load_file(path)


def save_safetensors(
    tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write contiguous tensors that share no memory to a safetensors file."""
    import safetensors.torch

    cast("Any", safetensors.torch).save_file(tensors, path, metadata=metadata)
