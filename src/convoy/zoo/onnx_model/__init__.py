"""ONNX files as PyTorch modules: the file is read as data, each operator is one of PyTorch's."""

from __future__ import annotations

from convoy.zoo.onnx_model.load import load_onnx

__all__ = ["load_onnx"]
