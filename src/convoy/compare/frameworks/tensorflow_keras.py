"""TensorFlow: the nets in Keras layers, run as a tf.function, with and without XLA.

keras.applications has no AlexNet and no GoogLeNet, and most of its other nets cannot give torchvision's outputs: ResNet50 has
the stride in the 1x1 convolutions, MobileNetV2 and EfficientNetB0 pad one side alone where a stride is 2, and InceptionV3
averages without its padding. So all nets are built here from Keras' layers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Final, cast

import numpy as np

from convoy.compare.case import LEARNING_RATE, MOMENTUM, Case
from convoy.compare.frameworks.base import BuiltModel, CaseInputs, FrameworkConfig, Outputs, net_of
from convoy.compare.nets import NETS, transform_input
from convoy.compare.nets.operators import Pad, pair

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

# Both are optional, and TensorFlow declares few types: a checker takes all that they give for Any.
keras = cast("Any", import_module("keras"))
tf = cast("Any", import_module("tensorflow"))

POLICIES: Final = {"fp32": "float32", "fp16": "mixed_float16", "bf16": "mixed_bfloat16"}
"""Keras' mixed precision in training, where parameters stay fp32."""

DTYPES: Final = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


class TensorFlow:
    """TensorFlow with Keras layers in NHWC, the only layout that its CPU kernels support."""

    def ways(self, case: Case, material: CaseInputs) -> Sequence[FrameworkConfig]:
        """The graph executor (oneDNN on a CPU), and XLA."""
        net_of(case)
        tf.config.threading.set_intra_op_parallelism_threads(case.threads)
        tf.config.threading.set_inter_op_parallelism_threads(1 if case.device == "cpu" else 2)
        if case.device == "cpu":
            tf.config.set_visible_devices([], "GPU")
        elif not tf.config.list_physical_devices("GPU"):
            raise RuntimeError("this TensorFlow finds no GPU: pip install 'tensorflow[and-cuda]>=2.20'")
        build = _train if case.training else _infer
        words = ("tf.function, nhwc", "tf.function with XLA (jit_compile), nhwc")
        ways = [FrameworkConfig(word, partial(build, case, material, xla=xla)) for xla, word in enumerate(words)]
        return ways[::-1] if case.device == "cuda" else ways


FRAMEWORK = TensorFlow()


class KerasLayers:
    """The operators as Keras layers, named after torch's parameters with "-" for ".".

    Args:
        weights: by torch's names; the layers take their shapes.
    """

    def __init__(self, weights: Outputs) -> None:
        self.weights = weights

    def conv(self, x: Any, name: str, stride: int = 1, pad: Pad = 0) -> Any:
        """A convolution, with a layer for zero padding: Keras' "same" pads differently at strides above 1.

        A depthwise convolution has its own kind of layer: TensorFlow has no gradients of grouped convolutions on a CPU.
        """
        k, c, r, s = self.weights[f"{name}.weight"].shape
        groups = x.shape[-1] // c
        padded = any(pair(pad))
        if padded and stride == 1 and (r, s) == tuple(2 * zeros + 1 for zeros in pair(pad)):
            padding = "same"
        else:
            padding = "valid"
            x = keras.layers.ZeroPadding2D(pad)(x) if padded else x
        more = {"use_bias": f"{name}.bias" in self.weights, "name": _word(name)}
        if groups == k > 1:
            return keras.layers.DepthwiseConv2D((r, s), stride, padding, **more)(x)
        return keras.layers.Conv2D(k, (r, s), stride, padding, groups=groups, **more)(x)

    def batch_norm(self, x: Any, name: str, eps: float) -> Any:
        """Batch norm; Keras' momentum is the weight of the old statistics."""
        return keras.layers.BatchNormalization(momentum=0.9, epsilon=eps, name=_word(name))(x)

    def relu(self, x: Any) -> Any:
        """ReLU."""
        return keras.layers.ReLU()(x)

    def relu6(self, x: Any) -> Any:
        """ReLU that ends at 6."""
        return keras.layers.ReLU(6.0)(x)

    def silu(self, x: Any) -> Any:
        """SiLU."""
        return keras.layers.Activation("silu")(x)

    def sigmoid(self, x: Any) -> Any:
        """Sigmoid."""
        return keras.layers.Activation("sigmoid")(x)

    def max_pool(self, x: Any, size: int, stride: int, low: int, high: int) -> Any:
        """Max pooling with zero padding: its inputs follow a ReLU, so zeros never win."""
        if low or high:
            x = keras.layers.ZeroPadding2D(((low, high), (low, high)))(x)
        return keras.layers.MaxPooling2D(size, stride, "valid")(x)

    def avg_pool(self, x: Any, size: int, stride: int, pad: int = 0) -> Any:
        """Average pooling, with a layer for zero padding: Keras' "same" leaves the zeros out of the averages."""
        x = keras.layers.ZeroPadding2D(pad)(x) if pad else x
        return keras.layers.AveragePooling2D(size, stride, "valid")(x)

    def mean(self, x: Any, *, keep: bool = False) -> Any:
        """Global average pooling, which sums half types in fp32."""
        return keras.layers.GlobalAveragePooling2D(keepdims=keep)(x)

    def flatten(self, x: Any) -> Any:
        """[n, c * h * w] in torch's order."""
        return keras.layers.Flatten()(keras.layers.Permute((3, 1, 2))(x))

    def linear(self, x: Any, name: str) -> Any:
        """Linear layer."""
        return keras.layers.Dense(self.weights[f"{name}.weight"].shape[0], name=_word(name))(x)

    def concat(self, xs: Sequence[Any]) -> Any:
        """Concatenation along channels."""
        return keras.layers.Concatenate(axis=-1)(list(xs))

    def add(self, x: Any, y: Any) -> Any:
        """Sum."""
        return keras.layers.Add()([x, y])

    def multiply(self, x: Any, gate: Any) -> Any:
        """Product with a gate, which is broadcast."""
        return keras.layers.Multiply()([x, gate])

    def affine(self, x: Any, scale: Sequence[float], shift: Sequence[float]) -> Any:
        """Scale and shift of each channel."""
        return keras.layers.Rescaling(np.array(scale), np.array(shift))(x)

    def height(self, x: Any) -> int:
        """Height, which is known when the net is built."""
        return int(x.shape[1])


def _word(name: str) -> str:
    return name.replace(".", "-")


def keras_model(case: Case, material: CaseInputs) -> Any:
    """The net as a Keras model with torch's weights."""
    weights = material.weights()
    n, c, h, w = material.input().shape
    if case.training:
        keras.mixed_precision.set_global_policy(POLICIES[case.dtype])
        kind = "float32"
    else:
        kind = DTYPES[case.dtype]
        keras.mixed_precision.set_global_policy(kind)
    ops = KerasLayers(weights)
    x = keras.Input((h, w, c), batch_size=n, dtype=kind)
    start = transform_input(ops, x) if material.facts.get("transform_input") else x
    model = keras.Model(x, NETS[case.model](ops, start))
    for layer in model.layers:
        name = layer.name.replace("-", ".")
        if layer.weights:
            layer.set_weights([weight for _, weight in _pieces(weights, name, layer)])
    return model


def _pieces(weights: Outputs, name: str, layer: Any) -> list[tuple[str, np.ndarray[Any, Any]]]:
    """A layer's arrays in Keras' order of arrays and dimensions, with torch's names."""
    if isinstance(layer, keras.layers.BatchNormalization):
        return [
            (f"{name}.{part}", weights[f"{name}.{part}"]) for part in ("weight", "bias", "running_mean", "running_var")
        ]
    weight = weights[f"{name}.weight"]
    if weight.ndim == 4:  # depthwise filters are [r, s, c, 1], others [r, s, c, k]
        depthwise = isinstance(layer, keras.layers.DepthwiseConv2D)
        weight = weight.transpose((2, 3, 0, 1) if depthwise else (2, 3, 1, 0))
    else:
        weight = weight.T
    found = [(f"{name}.weight", weight)]
    if f"{name}.bias" in weights:
        found.append((f"{name}.bias", weights[f"{name}.bias"]))
    return found


def _as_torch_has_it(array: np.ndarray[Any, Any], layer: Any) -> np.ndarray[Any, Any]:
    """A gradient in torch's order of dimensions."""
    if array.ndim != 4:
        return array.T
    return array.transpose((2, 3, 0, 1) if isinstance(layer, keras.layers.DepthwiseConv2D) else (3, 2, 0, 1))


def _input(case: Case, material: CaseInputs) -> Any:
    return tf.constant(material.input().transpose(0, 2, 3, 1), "float32" if case.training else DTYPES[case.dtype])


def _waited(case: Case, run: Callable[[], Any]) -> Callable[[], object] | None:
    """A function that waits for the GPU; None on a CPU, where results are complete when `run` returns."""
    del run
    return tf.test.experimental.sync_devices if case.device == "cuda" else None


def _memory(case: Case) -> Callable[[], int] | None:
    if case.device == "cpu":
        return None
    return lambda: int(tf.config.experimental.get_memory_info("GPU:0")["peak"])


def _restart_peak(case: Case) -> Callable[[], object] | None:
    """Restart the count of the peak, which would otherwise include XLA's autotuning and the slower configurations."""
    return (lambda: tf.config.experimental.reset_memory_stats("GPU:0")) if case.device == "cuda" else None


def _built(case: Case, run: Callable[[], Any], check: Callable[[], Outputs]) -> BuiltModel:
    return BuiltModel(run, check, wait=_waited(case, run), peak_memory=_memory(case), restart_peak=_restart_peak(case))


def _infer(case: Case, material: CaseInputs, *, xla: int) -> BuiltModel:
    model, x = keras_model(case, material), _input(case, material)

    def infer(x: Any) -> Any:
        return model(x, training=False)

    call = tf.function(infer, jit_compile=bool(xla))

    def run() -> Any:
        return call(x)

    def check() -> Outputs:
        return {"out0": tf.cast(run(), tf.float32).numpy()}

    return _built(case, run, check)


def _train(case: Case, material: CaseInputs, *, xla: int) -> BuiltModel:
    model, x = keras_model(case, material), _input(case, material)
    labels = tf.constant(material.labels())
    optimizer: Any = keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM)
    if case.dtype == "fp16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**10)
    optimizer.build(model.trainable_variables)

    @tf.function(jit_compile=bool(xla))
    def step() -> Any:
        with tf.GradientTape() as tape:
            outputs = tf.cast(model(x, training=True), tf.float32)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs))
            scaled = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
        return loss

    def gradients() -> Outputs:
        """Gradients of the first step: Keras' momentum is then the gradient times minus the learning rate."""
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        velocities = {
            v.path: m.numpy() / -LEARNING_RATE for v, m in zip(model.trainable_variables, inner.momentums, strict=True)
        }
        found: Outputs = {}
        for layer in model.layers:
            if layer.weights:
                names = [name for name, _ in _pieces(material_weights, layer.name.replace("-", "."), layer)]
                for name, variable in zip(names, layer.trainable_variables, strict=False):
                    found[f"grad:{name}"] = _as_torch_has_it(velocities[variable.path], layer)
        return found

    material_weights = material.weights()

    def check() -> Outputs:
        loss0 = np.asarray(step().numpy(), np.float64)
        found = gradients()
        return {"loss0": loss0, "loss1": np.asarray(step().numpy(), np.float64), **found}

    return _built(case, step, check)
