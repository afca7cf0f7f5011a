"""Squeeze-and-excitation blocks as pieces of a graph. Not a test module."""

from convoy.problem import SubgraphProblem

CASES = {
    # n, c, hidden, h, w, dtype, inner, outer, biases of both layers, nodes behind the product
    "efficientnet": (2, 48, 12, 7, 9, "fp32", "silu", "sigmoid", (True, True), ""),
    "mobilenet": (1, 72, 24, 5, 4, "fp16", "relu", "hardsigmoid", (True, True), ""),
    "residual": (2, 64, 16, 6, 6, "fp32", "relu", "sigmoid", (True, True), "add"),
    "residual and relu": (3, 32, 8, 3, 5, "fp16", "relu", "sigmoid", (True, True), "add relu"),
    "relu": (1, 40, 20, 4, 4, "fp32", "relu", "sigmoid", (True, False), "relu"),
    "no biases": (2, 24, 6, 5, 5, "fp32", "silu", "sigmoid", (False, False), ""),
    "no inner activation": (1, 16, 4, 8, 8, "fp32", "none", "sigmoid", (True, True), ""),
    "many hidden": (2, 136, 200, 2, 3, "fp32", "silu", "sigmoid", (True, True), ""),
    "one pixel": (3, 32, 8, 1, 1, "fp32", "hardswish", "hardsigmoid", (False, True), ""),
    "large": (1, 16, 4, 40, 41, "fp32", "silu", "sigmoid", (True, True), ""),
    "one hidden": (1, 8, 1, 3, 3, "bf16", "relu", "sigmoid", (True, True), ""),
}

NAMES = {"adaptive": "aten.adaptive_avg_pool2d.default(%x, (1, 1))", "mean": "aten.mean.dim(%x, (2, 3), True)"}
"""Operators that take the mean of an image."""


def block(name, dtype="", layout="nhwc", mean="mean"):
    """The piece of a case."""
    return SubgraphProblem(block_of(CASES[name], dtype, mean), layout)


def block_of(case, dtype="", mean="mean"):
    """The text of a piece with the sizes of a case."""
    n, c, hidden, h, w, own, inner, outer, biases, behind = case
    dtype = dtype or own
    images, gate, between = f"{dtype}[{n},{c},{h},{w}]", f"{dtype}[{n},{c},1,1]", f"{dtype}[{n},{hidden},1,1]"
    lines = ["graph 1", f"input %x: {images}"]
    lines += [f"input %r: {images}"] if "add" in behind else []
    sizes = ((hidden, c), (c, hidden))
    for index, ((rows, columns), bias) in enumerate(zip(sizes, biases, strict=True)):
        lines.append(f"constant %w{index}: {dtype}[{rows},{columns},1,1]")
        lines += [f"constant %b{index}: {dtype}[{rows}]"] if bias else []
    given = [f"%b{index}" if bias else "None" for index, bias in enumerate(biases)]
    places = "(1, 1), (0, 0), (1, 1), 1"
    lines.append(f"%m: {gate} = {NAMES[mean]}")
    lines.append(f"%s: {between} = conv2d(%m, %w0, {given[0]}, {places})")
    source = "%s"
    if inner != "none":
        lines.append(f"%a: {between} = aten.{inner}.default(%s)")
        source = "%a"
    lines.append(f"%e: {gate} = conv2d({source}, %w1, {given[1]}, {places})")
    lines.append(f"%g: {gate} = aten.{outer}.default(%e)")
    lines.append(f"%y: {images} = aten.mul.Tensor({'%g, %x' if mean == 'adaptive' else '%x, %g'})")
    result = "%y"
    if "add" in behind:
        lines.append(f"%t: {images} = aten.add.Tensor(%y, %r)")
        result = "%t"
    if "relu" in behind:
        lines.append(f"%z: {images} = aten.relu.default({result})")
        result = "%z"
    lines.append(f"return {result}")
    return "\n".join(lines) + "\n"
