"""Group norms with the activations behind them, as pieces of a graph. Not a test module."""

from convoy.problem import SubgraphProblem

CASES = {
    # n, c, groups, h (of volumes d and h), w, dtype, the activation behind the norm, whether the norm has a scale and a shift
    "silu": (2, 32, 8, 17, 19, "fp32", "silu", True),
    "alone": (1, 24, 2, 3, 5, "fp32", "", True),
    "relu": (3, 16, 16, 4, 4, "fp32", "relu", True),
    "one group": (2, 40, 1, 3, 3, "fp32", "silu", True),
    "groups of ten": (1, 80, 8, 4, 5, "fp16", "silu", True),
    "without constants": (2, 12, 4, 3, 4, "fp32", "silu", False),
    "one pixel": (2, 32, 8, 1, 1, "fp32", "silu", True),
    "volumes": (2, 16, 4, (3, 5), 4, "fp32", "silu", True),
    "instances of volumes": (2, 24, 24, (4, 3), 5, "fp16", "relu", True),
    "instances without constants": (3, 8, 8, 5, 7, "fp32", "", False),
    "halves": (2, 64, 32, 6, 6, "fp16", "silu", True),
}

LEAKY_CASES = {
    "leaky": (2, 8, 8, (3, 4), 3, "fp32", "leaky_relu", True),
    "leaky without constants": (2, 16, 4, 5, 5, "fp16", "leaky_relu", False),
    "one factor": (2, 12, 12, 4, 6, "fp32", "prelu", True),
}
"""Of activations that not all engines apply."""


def piece(name, dtype="", layout=""):
    """The piece of a case; in channels_last unless a layout is given."""
    n, c, groups, h, w, own, behind, affine = {**CASES, **LEAKY_CASES}[name]
    dtype = dtype or own
    sides = (*h, w) if isinstance(h, tuple) else (h, w)
    layout = layout or ("ndhwc" if len(sides) == 3 else "nhwc")
    images, row = f"{dtype}[{n},{c},{','.join(map(str, sides))}]", f"{dtype}[{c}]"
    lines = ["graph 1", f"input %x: {images}"]
    lines += [f"constant %g: {row}", f"constant %b: {row}"] if affine else []
    constants = "%g, %b" if affine else "None, None"
    lines.append(f"%y: {images} = aten.group_norm.default(%x, {groups}, {constants}, 1e-05, False)")
    factor = {"leaky_relu": ", 0.2", "prelu": ", %p"}.get(behind, "")
    if behind == "prelu":
        lines.insert(-1, f"constant %p: {dtype}[1]")
    lines += [f"%z: {images} = aten.{behind}.default(%y{factor})", "return %z"] if behind else ["return %y"]
    return SubgraphProblem("\n".join(lines) + "\n", layout)
