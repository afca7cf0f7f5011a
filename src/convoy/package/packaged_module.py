"""PackagedModule: a net from a package, called like the module that it was exported from."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from convoy.engines.torch_operators import DTYPES
from convoy.errors import InputError
from convoy.package.cuda.cuda_program import PackagedCudaProgram
from convoy.package.cuda.recorded_graph import RecordedGraph
from convoy.package.manifest import Manifest
from convoy.package.program_file import PackedProgram, PackedTensor
from convoy.package.samples import batch_sizes, run_samples
from convoy.plan.plan import Plan

if TYPE_CHECKING:
    from convoy.package.cuda.recorded_net import RecordedNet
    from convoy.program import Program
    from convoy.program.call_forms import CallArguments


@dataclass(frozen=True, eq=False)
class PackagedModule:
    """A net that runs from a package. It takes and returns what the exported module did, without gradients.

    It may be called from several threads at once. Calls take one of the shapes that were exported.

    Attributes:
        path: the package.
        manifest: its manifest.
        programs: a program for each set of input shapes.
        packed: the same programs as the package holds them.
    """

    path: str
    manifest: Manifest
    programs: tuple[Program | RecordedNet, ...]
    packed: tuple[PackedProgram | RecordedGraph, ...]

    @property
    def device(self) -> torch.device:
        """The device that it runs on: the CPU, or the GPU that was current when it was opened."""
        runnable = self.programs[0].runnable
        return runnable.device if isinstance(runnable, PackagedCudaProgram) else torch.device("cpu")

    @property
    def model(self) -> str:
        """The name of the model that was exported."""
        return self.manifest.model

    @property
    def plan(self) -> Plan:
        """The plan of the first program."""
        return self.programs[0].plan

    @property
    def inputs(self) -> tuple[PackedTensor, ...]:
        """Inputs of the first program: name, shape, dtype and memory format."""
        return self.packed[0].inputs

    @property
    def outputs(self) -> tuple[PackedTensor, ...]:
        """Outputs of the first program."""
        return self.packed[0].outputs

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Batch sizes that were exported, ascending; empty if inputs and outputs are no batches."""
        return batch_sizes(self.packed)

    def run_samples(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run on any number of samples: in batches of the sizes that were exported, the last one padded with zeros.

        Args:
            inputs: each [samples, ...], with the other sizes and the dtype of the package's input.

        Returns:
            The outputs in the order of `outputs`, each [samples, ...].

        Raises:
            InputError: the package has no batches, or inputs of other shapes or dtypes.
        """
        return run_samples(self, self.packed, inputs)

    def example_inputs(self, program: int = 0) -> tuple[torch.Tensor, ...]:
        """Inputs of a program's shapes and dtypes: standard normal with a fixed seed, or zeros for integers."""
        draw = torch.Generator().manual_seed(0)
        found: list[torch.Tensor] = []
        for one in self.packed[program].inputs:
            dtype = DTYPES[one.spec.dtype]
            made = (
                torch.randn(one.spec.shape, generator=draw) if dtype.is_floating_point else torch.zeros(one.spec.shape)
            )
            found.append(made.to(self.device, dtype))
        return tuple(found)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on arguments like those of the exported module; inputs may be given by position or by their names (`inputs`).

        Raises:
            InputError: another structure, shape, dtype or device than was exported.
        """
        errors: list[InputError] = []
        for program, packed in zip(self.programs, self.packed, strict=True):
            assert program.captured is not None
            refused: InputError | None = None
            for form in _forms(packed, args, kwargs):
                try:
                    tensors = program.captured.flatten_inputs(*form)
                except InputError as error:
                    refused = refused or error  # about the form in which the user calls
                    continue
                for tensor in tensors:
                    if tensor.device.type != self.device.type:
                        raise InputError(
                            "args", str(tensor.device), f"tensors on {self.device}, for which the package was made"
                        )
                with torch.no_grad():
                    return program(*form)
            assert refused is not None
            errors.append(refused)
        if len(errors) == 1:
            raise errors[0]
        shapes = "; or ".join(", ".join(str(one.spec) for one in program.inputs) for program in self.packed)
        raise InputError("args", _shapes(args), f"shapes that were exported: {shapes}") from errors[0]

    def __repr__(self) -> str:
        return f"PackagedModule({self.path!r}, model={self.model!r}, inputs=[{', '.join(str(i.spec) for i in self.inputs)}])"


def _forms(
    packed: PackedProgram | RecordedGraph, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Generator[CallArguments]:
    """The call as it is; then, if it gives every input, by position or by name, with fewer and fewer of them by position."""
    yield args, kwargs
    names = [one.name for one in packed.inputs]
    if len(args) <= len(names) and kwargs.keys() == set(names[len(args) :]):
        given = [*args, *(kwargs[name] for name in names[len(args) :])]
        for count in range(len(names), -1, -1):
            yield tuple(given[:count]), dict(zip(names[count:], given[count:], strict=True))


def _shapes(args: Sequence[Any]) -> list[object]:
    return [list(one.shape) if isinstance(one, torch.Tensor) else type(one).__name__ for one in args]
