"""Model names to modules: torchvision, timm, Convoy's own nets for CIFAR-10, a file's factory, a saved torch.export program."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from convoy.errors import InputError
from convoy.typed_torch import seeded_rng
from convoy.zoo import weights as checkpoints
from convoy.zoo.cifar import CIFAR_NETS
from convoy.zoo.example import input_size
from convoy.zoo.exported import load_program
from convoy.zoo.head import fit_heads_to
from convoy.zoo.initial import calibrate, initialise
from convoy.zoo.model_names import ONNX, TIMM, is_exported, model_names, parse_dtype, split_factory, unknown_model
from convoy.zoo.onnx_model import load_onnx
from convoy.zoo.torchvision_import import import_torchvision

SEED = 0
"""Seed of randomly initialised models: the same name gives the same weights."""


def load_model(
    name: str,
    *,
    weights: str | Path | None = None,
    dtype: str | None = "fp32",
    num_classes: int | None = None,
    trust: bool = False,
) -> nn.Module:
    """Make the module that a name stands for, in evaluation mode, on the CPU.

    Args:
        name: a torchvision name (`alexnet`), `timm:NAME`, a net of `convoy.zoo.cifar` (`resnet20_cifar10`),
            `path/to/file.py:factory` (a function without arguments, or a class, that gives an `nn.Module`; needs `trust`),
            a program saved by `torch.export.save` (`net.pt2`), or an ONNX file (`net.onnx`).
        weights: `DEFAULT` (torchvision's or timm's own, by their own download), a .safetensors file with exactly the
            model's names and shapes (the last layer may have another number of outputs), a checkpoint of `convoy train`,
            or None: a random initialisation with a fixed seed that keeps activations near unit scale and batch-norm
            statistics non-trivial, so that a numerical error shows. A .pt2 and an .onnx have weights of their own.
        dtype: `fp32`, `fp16`, `bf16` or `fp64`; a .pt2 must have been exported in it. None: a .pt2's own, else fp32.
        num_classes: outputs of the last layer, for torchvision and timm; None: as the weights file has it, else the
            model's own default.
        trust: run the code of the file that `name` stands for: a Python file always is code; a .pt2 file is read as data
            without this, and refused where it holds more (SECURITY.md).

    Raises:
        InputError: naming the argument that is missing, does not fit or is not trusted.
    """
    kind = parse_dtype(dtype or "fp32")
    if num_classes is not None and num_classes < 1:
        raise InputError("num_classes", num_classes, "an integer of at least 1, or None")
    if is_exported(name):
        _refuse(weights, num_classes, "the file has its own weights and classes")
        if name.endswith(ONNX):
            return load_onnx(Path(name), kind)
        return load_program(Path(name), None if dtype is None else kind, trust=trust)
    file, factory = split_factory(name)
    if file is not None and not file.is_file():
        raise InputError("model", str(file), "a Python file that is there")
    if file is not None and not trust:
        todo = "A Python file is code. Allow it to run, if you trust its author: --trust (trust=True)."
        raise InputError("model", name, "a model that needs no code, or trust", todo)
    with seeded_rng(SEED):
        if file is not None:
            if weights == "DEFAULT" or num_classes is not None:
                _refuse(
                    weights, num_classes, "a factory gives its own classes, and weights come from a .safetensors file"
                )
            model = _from_file(file, factory)
            if weights is not None:
                state = checkpoints.read(Path(weights))
                if checkpoints.other_classes(model, state) is not None:
                    fit_heads_to(model, state)
                checkpoints.load_into(model, state, Path(weights))
        else:
            model = _from_zoo(name, weights, num_classes)
    return model.eval().to(kind)


def _refuse(weights: object, num_classes: object, why: str) -> None:
    if weights is not None:
        raise InputError("weights", str(weights), "no weights with this model", f"Because {why}.")
    if num_classes is not None:
        raise InputError("num_classes", num_classes, "None with this model", f"Because {why}.")


def _from_zoo(name: str, weights: str | Path | None, num_classes: int | None) -> nn.Module:
    build = _builder(name)
    if weights is None:
        model = build(num_classes)
        initialise(model)
        calibrate(model, input_size(name))
        return model
    if weights == "DEFAULT":
        if num_classes is not None:
            raise InputError("num_classes", num_classes, "None with DEFAULT weights")
        if name.startswith(TIMM):
            return checkpoints.timm_default(name.removeprefix(TIMM))
        if name in CIFAR_NETS:
            raise InputError("weights", weights, f"a .safetensors file: {name} has no download")
        return checkpoints.torchvision_default(name)
    file = Path(weights)
    state = checkpoints.read(file)
    model = build(num_classes)
    if num_classes is None:
        classes = checkpoints.other_classes(model, state)
        model = build(classes) if classes is not None else model
    checkpoints.load_into(model, state, file)
    return model


def _builder(name: str) -> Callable[[int | None], nn.Module]:
    if name in CIFAR_NETS:
        return lambda num_classes: CIFAR_NETS[name](**({} if num_classes is None else {"num_classes": num_classes}))
    return _timm_builder(name) if name.startswith(TIMM) else _torchvision_builder(name)


def _torchvision_builder(name: str) -> Callable[[int | None], nn.Module]:
    if name not in model_names():
        raise unknown_model(name)
    models = import_torchvision().models
    options: dict[str, Any] = {"weights": None}
    accepted = inspect.signature(models.get_model_builder(name)).parameters
    if "weights_backbone" in accepted:
        options["weights_backbone"] = None  # its default is a download
    if name in ("googlenet", "inception_v3"):
        options |= {"aux_logits": False, "init_weights": False}  # their own truncated normal takes half a minute

    def build(num_classes: int | None) -> nn.Module:
        return models.get_model(name, **options, **({} if num_classes is None else {"num_classes": num_classes}))

    return build


def _timm_builder(name: str) -> Callable[[int | None], nn.Module]:
    import_torchvision()
    import timm

    plain = name.removeprefix(TIMM)
    if not timm.is_model(plain):
        raise unknown_model(name)

    def build(num_classes: int | None) -> nn.Module:
        options: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
        return timm.create_model(plain, pretrained=False, **options)

    return build


def _from_file(file: Path, factory: str) -> nn.Module:
    """Run the user's file as a module of its own and call its factory; the file's folder is importable meanwhile."""
    spec = importlib.util.spec_from_file_location(f"convoy_user_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise InputError("model", str(file), "a Python file that can be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling inside the file look themselves up there
    sys.path.insert(0, str(file.resolve().parent))
    try:
        spec.loader.exec_module(module)
        make = getattr(module, factory, None)
        if make is None:
            offers = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == spec.name]
            raise InputError(
                "model", f"{file}:{factory}", "a name that the file defines", f"It has: {', '.join(offers)}."
            )
        model = make() if not isinstance(make, nn.Module) else make
    except InputError:
        raise
    except Exception as error:  # the user's own code may fail in any way; the traceback stays attached as the cause
        raise InputError(
            "model", f"{file}:{factory}", "a factory that runs", f"It raised {type(error).__name__}: {error}"
        ) from error
    finally:
        sys.path.remove(str(file.resolve().parent))
    if not isinstance(model, nn.Module):
        raise InputError("model", f"{file}:{factory}", f"a factory of an nn.Module, not of a {type(model).__name__}")
    return model
