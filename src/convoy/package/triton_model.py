"""The model of a package in Triton Inference Server's Python backend. `convoy export --triton` copies this file as `model.py`.

Triton's dynamic batcher gives several requests at once; they are run as batches of the package's sizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # pyright: ignore[reportPrivateImportUsage]

import convoy


class TritonPythonModel:
    """What the backend calls: `initialize` once for each instance, `execute` for requests, `finalize` at the end."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the package that lies beside this file, and run it once.

        Args:
            args: of the backend: of an instance on a GPU, the GPU's index.
        """
        if args.get("model_instance_kind") == "GPU":
            torch.cuda.set_device(int(args["model_instance_device_id"]))
        import triton_python_backend_utils as backend  # pyright: ignore[reportMissingImports]

        self.backend: Any = backend
        (path,) = Path(__file__).parent.glob("*.convoy")
        self.net = convoy.open(path, trust=True)  # who can write into a model repository can run code as it is
        self.net(*self.net.example_inputs())

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer requests: those of equal shapes together, a request that cannot be answered by an error of its own."""
        answers: dict[int, Any] = {}
        groups: dict[Any, list[tuple[int, list[torch.Tensor]]]] = {}
        for index, request in enumerate(requests):
            try:
                given = [self.tensor(request, one.name) for one in self.net.inputs]
            except (ValueError, RuntimeError) as error:
                answers[index] = self.refusal(error)
                continue
            key = tuple((tensor.shape[1:], tensor.dtype) for tensor in given)
            groups.setdefault(key if self.net.batch_sizes else index, []).append((index, given))
        for group in groups.values():
            for (index, _), answer in zip(group, self.answered([given for _, given in group]), strict=True):
                answers[index] = answer
        return [answers[index] for index in range(len(requests))]

    def tensor(self, request: Any, name: str) -> torch.Tensor:
        """An input of a request."""
        found = self.backend.get_input_tensor_by_name(request, name)
        if found is None:
            raise ValueError(f"input {name} is missing")
        return from_dlpack(found.to_dlpack()).to(self.net.device)

    def answered(self, requests: list[list[torch.Tensor]]) -> list[Any]:
        """Responses to requests of equal shapes."""
        try:
            if not self.net.batch_sizes:
                outputs = [self.whole(given) for given in requests]
            else:
                counts = [len(given[0]) for given in requests]
                joined = [torch.cat(tensors) for tensors in zip(*requests, strict=True)]
                split: list[tuple[torch.Tensor, ...]] = [
                    torch.split(one, counts)  # pyright: ignore[reportUnknownMemberType]
                    for one in self.net.run_samples(*joined)
                ]
                outputs = list(zip(*split, strict=True))
        except (convoy.ConvoyError, RuntimeError) as error:
            return [self.refusal(error) for _ in requests]
        return [self.response(one) for one in outputs]

    def whole(self, given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Outputs of one call."""
        from torch.utils import _pytree as pytree

        named = {one.name: tensor for one, tensor in zip(self.net.inputs, given, strict=True)}
        return tuple(one for one in pytree.tree_leaves(self.net(**named)) if isinstance(one, torch.Tensor))

    def response(self, outputs: tuple[torch.Tensor, ...]) -> Any:
        """A response with the outputs by their names."""
        named = zip(self.net.outputs, outputs, strict=True)
        tensors = [self.backend.Tensor.from_dlpack(one.name, to_dlpack(y.contiguous())) for one, y in named]
        return self.backend.InferenceResponse(output_tensors=tensors)

    def refusal(self, error: Exception) -> Any:
        """A response that says why there is no answer."""
        return self.backend.InferenceResponse(output_tensors=[], error=self.backend.TritonError(str(error)))

    def finalize(self) -> None:
        """Close the package."""
        del self.net
