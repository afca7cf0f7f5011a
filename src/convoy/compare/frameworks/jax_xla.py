"""JAX: the nets as plain functions over jax.lax, compiled by XLA with jax.jit; training updates donated buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from convoy.compare.case import LEARNING_RATE, MOMENTUM, Case
from convoy.compare.frameworks.base import BuiltModel, CaseInputs, FrameworkConfig, Outputs, net_of
from convoy.compare.nets import NETS, transform_input
from convoy.compare.nets.operators import Pad, pair

if TYPE_CHECKING:
    from jax import Array

# JAX is optional, and most of its functions declare their types in part only.
jax = cast("Any", import_module("jax"))
jnp = cast("Any", import_module("jax.numpy"))
lax = cast("Any", import_module("jax.lax"))

DTYPES: Final = {"fp32": jnp.float32, "fp16": jnp.float16, "bf16": jnp.bfloat16}

BATCH_NORM_MOMENTUM: Final = 0.1
"""Weight of the new statistics, as torch defines momentum."""

Parameters = dict[str, Any]
"""Arrays by name."""


class Jax:
    """JAX with jit, weights as arguments, and both layouts."""

    def ways(self, case: Case, material: CaseInputs) -> Sequence[FrameworkConfig]:
        """Both memory formats on a CPU. On a GPU XLA assigns layouts itself: the second is tried if the first fails."""
        net_of(case)
        cuda = case.device == "cuda"
        jax.config.update("jax_platforms", "cuda" if cuda else "cpu")
        build = _train if case.training else _infer
        more = ("" if not case.training else ", donated buffers") + (", XLA's autotuning" if cuda else "")
        return [
            FrameworkConfig(
                f"jax.jit, {layout}{more}", partial(build, case, material, layout), spare=cuda and index > 0
            )
            for index, layout in enumerate(("nhwc", "nchw"))
        ]


FRAMEWORK = Jax()


class Lax:
    """The operators in jax.lax.

    Args:
        parameters: weights by torch's names, filters already in the layout's order.
        layout: `nhwc` or `nchw`.
        training: batch norms use the batch's statistics; updated running statistics are in `statistics`.
    """

    def __init__(self, parameters: Parameters, layout: str, *, training: bool) -> None:
        self.parameters, self.nhwc, self.training = parameters, layout == "nhwc", training
        self.statistics: Parameters = {}

    def conv(self, x: Array, name: str, stride: int = 1, pad: Pad = 0) -> Array:
        """A convolution. No accumulator type is given, because XLA accumulates half types in fp32."""
        weight = self.parameters[f"{name}.weight"].astype(x.dtype)
        y = lax.conv_general_dilated(
            x,
            weight,
            (stride, stride),
            [(zeros, zeros) for zeros in pair(pad)],
            dimension_numbers=("NHWC", "HWIO", "NHWC") if self.nhwc else ("NCHW", "OIHW", "NCHW"),
            feature_group_count=x.shape[3] // weight.shape[2] if self.nhwc else x.shape[1] // weight.shape[1],
        )
        bias = self.parameters.get(f"{name}.bias")
        return y if bias is None else y + self._channels(bias.astype(x.dtype))

    def batch_norm(self, x: Array, name: str, eps: float) -> Array:
        """Batch norm, with statistics in fp32."""
        scale, shift, mean, variance = (
            self.parameters[f"{name}.{part}"] for part in ("weight", "bias", "running_mean", "running_var")
        )
        if self.training:
            axes = (0, 1, 2) if self.nhwc else (0, 2, 3)
            wide = x.astype(jnp.float32)
            old_mean, old_variance = mean, variance
            mean, variance = wide.mean(axes), wide.var(axes)
            count = x.size // mean.size
            unbiased = variance * (count / max(1, count - 1))
            for part, old, new in (("running_mean", old_mean, mean), ("running_var", old_variance, unbiased)):
                self.statistics[f"{name}.{part}"] = lax.stop_gradient(old + BATCH_NORM_MOMENTUM * (new - old))
        centred = x.astype(jnp.float32) - self._channels(mean)
        return (centred * self._channels(scale * lax.rsqrt(variance + eps)) + self._channels(shift)).astype(x.dtype)

    def relu(self, x: Array) -> Array:
        """`jax.nn.relu`."""
        return jax.nn.relu(x)

    def relu6(self, x: Array) -> Array:
        """`jax.nn.relu6`."""
        return jax.nn.relu6(x)

    def silu(self, x: Array) -> Array:
        """`jax.nn.silu`."""
        return jax.nn.silu(x)

    def sigmoid(self, x: Array) -> Array:
        """`jax.nn.sigmoid`."""
        return jax.nn.sigmoid(x)

    def max_pool(self, x: Array, size: int, stride: int, low: int, high: int) -> Array:
        """Max pooling; reduce_window pads with -inf."""
        pads = self._sides((low, high), (0, 0))
        return lax.reduce_window(x, -jnp.inf, lax.max, self._sides(size, 1), self._sides(stride, 1), pads)

    def avg_pool(self, x: Array, size: int, stride: int, pad: int = 0) -> Array:
        """Average pooling, with sums in fp32."""
        window, strides, pads = self._sides(size, 1), self._sides(stride, 1), self._sides((pad, pad), (0, 0))
        sums = lax.reduce_window(x.astype(jnp.float32), 0.0, lax.add, window, strides, pads)
        return (sums / size**2).astype(x.dtype)

    def mean(self, x: Array, *, keep: bool = False) -> Array:
        """Mean over height and width; jax.numpy sums half types in fp32."""
        return x.mean((1, 2) if self.nhwc else (2, 3), keepdims=keep)

    def flatten(self, x: Array) -> Array:
        """[n, c * h * w] in torch's order."""
        return (x.transpose(0, 3, 1, 2) if self.nhwc else x).reshape(x.shape[0], -1)

    def linear(self, x: Array, name: str) -> Array:
        """Matrix product with the weight, stored as [c, k], plus the bias."""
        weight, bias = self.parameters[f"{name}.weight"], self.parameters[f"{name}.bias"]
        return x @ weight.astype(x.dtype) + bias.astype(x.dtype)

    def concat(self, xs: Sequence[Array]) -> Array:
        """Concatenation along channels."""
        return jnp.concatenate(xs, 3 if self.nhwc else 1)

    def add(self, x: Array, y: Array) -> Array:
        """Sum."""
        return x + y

    def multiply(self, x: Array, gate: Array) -> Array:
        """Product with a gate whose height and width are 1."""
        return x * gate

    def affine(self, x: Array, scale: Sequence[float], shift: Sequence[float]) -> Array:
        """Scale and shift of each channel."""
        return x * self._channels(jnp.array(scale, x.dtype)) + self._channels(jnp.array(shift, x.dtype))

    def height(self, x: Array) -> int:
        """Height, which is known while tracing."""
        return int(x.shape[1 if self.nhwc else 2])

    def _sides(self, each: Any, others: Any) -> tuple[Any, ...]:
        return (others, each, each, others) if self.nhwc else (others, others, each, each)

    def _channels(self, values: Array) -> Array:
        return values if self.nhwc else values[:, None, None]


def forward(case: Case, layout: str, facts: Any, parameters: Parameters, x: Array) -> tuple[Array, Parameters]:
    """The net's outputs [n, classes] and, in training, its new running statistics."""
    ops = Lax(parameters, layout, training=case.training)
    x = transform_input(ops, x) if facts.get("transform_input") else x
    return NETS[case.model](ops, x), ops.statistics


def parameters_of(material: CaseInputs, layout: str, dtype: Any) -> Parameters:
    """Weights on the device, with the order of dimensions that the layout needs."""
    found: Parameters = {}
    for name, weight in material.weights().items():
        if name.endswith("num_batches_tracked"):
            continue
        if weight.ndim == 4 and layout == "nhwc":
            weight = weight.transpose(2, 3, 1, 0)
        elif weight.ndim == 2:
            weight = weight.transpose(1, 0)
        keep = weight.ndim == 1 or "running" in name  # batch norm stays in fp32
        found[name] = jnp.asarray(weight, jnp.float32 if keep else dtype)
    return found


def as_torch_has_it(array: Array, layout: str) -> np.ndarray[Any, Any]:
    """A gradient in torch's order of dimensions."""
    found = np.asarray(array, np.float32)
    if found.ndim == 4 and layout == "nhwc":
        return found.transpose(3, 2, 0, 1)
    return found.transpose(1, 0) if found.ndim == 2 else found


def _input(case: Case, material: CaseInputs, layout: str) -> Array:
    x = material.input()
    return jnp.asarray(x.transpose(0, 2, 3, 1) if layout == "nhwc" else x, DTYPES[case.dtype])


def _memory(case: Case, compiled: Any) -> Callable[[], int] | None:
    """On a GPU, the memory that XLA planned for the call: the device's own peak includes compiling and cannot be reset."""
    if case.device == "cpu":
        return None
    planned = compiled.memory_analysis()
    if planned is None:
        return lambda: int(jax.devices()[0].memory_stats()["peak_bytes_in_use"])
    whole = planned.argument_size_in_bytes + planned.output_size_in_bytes + planned.temp_size_in_bytes
    return lambda: int(whole - planned.alias_size_in_bytes)


def _infer(case: Case, material: CaseInputs, layout: str) -> BuiltModel:
    x = _input(case, material, layout)
    parameters = parameters_of(material, layout, DTYPES[case.dtype])

    def outputs_of(parameters: Parameters, x: Array) -> Array:
        return forward(case, layout, material.facts, parameters, x)[0]

    compiled = jax.jit(outputs_of).lower(parameters, x).compile()
    last: list[Any] = [None]

    def run() -> object:
        last[0] = compiled(parameters, x)
        return last[0]

    def check() -> Outputs:
        return {"out0": np.asarray(run(), np.float32)}

    return BuiltModel(run, check, wait=lambda: jax.block_until_ready(last[0]), peak_memory=_memory(case, compiled))


def _train(case: Case, material: CaseInputs, layout: str) -> BuiltModel:
    x, labels = _input(case, material, layout), jnp.asarray(material.labels())
    everything = parameters_of(material, layout, jnp.float32)
    fixed = {name: array for name, array in everything.items() if "running" in name}
    weights = {name: array for name, array in everything.items() if "running" not in name}

    def loss_of(weights: Parameters, fixed: Parameters) -> tuple[Array, Parameters]:
        outputs, statistics = forward(case, layout, material.facts, {**weights, **fixed}, x)
        chances = jax.nn.log_softmax(outputs.astype(jnp.float32))
        return -jnp.take_along_axis(chances, labels[:, None], 1).mean(), statistics

    def step(weights: Parameters, fixed: Parameters, momenta: Parameters) -> tuple[Any, ...]:
        (loss, statistics), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights, fixed)
        momenta = {name: MOMENTUM * momenta[name] + gradients[name] for name in weights}
        weights = {name: weights[name] - LEARNING_RATE * momenta[name] for name in weights}
        return weights, {**fixed, **statistics}, momenta, loss

    state: list[Any] = [weights, fixed, {name: jnp.zeros_like(array) for name, array in weights.items()}, None]
    compiled = jax.jit(step, donate_argnums=(0, 1, 2)).lower(*state[:3]).compile()

    def run() -> object:
        state[:] = compiled(*state[:3])
        return state[3]

    def check() -> Outputs:
        loss0 = np.asarray(run(), np.float64)
        gradients = {f"grad:{name}": as_torch_has_it(array, layout) for name, array in state[2].items()}
        return {"loss0": loss0, "loss1": np.asarray(run(), np.float64), **gradients}

    return BuiltModel(run, check, wait=lambda: jax.block_until_ready(state[3]), peak_memory=_memory(case, compiled))
