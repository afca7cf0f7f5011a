"""Batch norms of training steps that the tests of triton.batch_norm share, as pieces of a graph. Not a test module."""

from convoy.problem import SubgraphProblem

CASES = {
    # n, c, h (of volumes d and h), w, dtype, what stands beside the norm
    "alone": (2, 24, 5, 7, "fp32", ""),
    "relu": (3, 64, 6, 5, "fp32", "relu"),
    "residual and relu": (2, 40, 4, 4, "fp32", "add relu"),
    "residual": (2, 33, 3, 5, "fp32", "add"),
    "volumes": (2, 24, (3, 2), 5, "fp32", "relu"),
    "halves of volumes": (1, 32, (2, 4), 3, "fp16", "add relu"),
    "part of volumes": (2, 16, (2, 3), 3, "fp32", "part relu"),
    "halves": (2, 96, 7, 7, "fp16", "relu"),
    "many channels": (2, 264, 2, 3, "fp32", "relu"),
    "two values": (1, 16, 1, 2, "fp32", ""),
    "part": (2, 40, 4, 5, "fp32", "part relu"),
    "part of halves": (2, 24, 3, 5, "fp16", "part relu"),
}


def sides_of(h, w):
    """Height and width, or depth, height and width, as text."""
    return ",".join(map(str, (*h, w) if isinstance(h, tuple) else (h, w)))


def forward(name, dtype="", unread=False):
    """The forward piece of a case, in NHWC; with `unread`, nobody reads the statistics."""
    n, c, h, w, own, beside = CASES[name]
    dtype = dtype or own
    images, row = f"{dtype}[{n},{c},{sides_of(h, w)}]", f"fp32[{c}]"
    lines = ["graph 1", f"input %x: {images}", *(f"input %p{i}: {row}" for i in range(4))]
    if "add" in beside:
        lines.append(f"input %r: {images}")
    stats = "_, _, _, _" if unread else ", ".join(f"%s{i}: {row}" for i in range(4))
    lines.append(
        f"%y: {images}, {stats} = aten._native_batch_norm_legit_functional.default(%x, %p0, %p1, %p2, %p3, True, 0.1, 1e-05)"
    )
    last = "%y"
    if "add" in beside:
        lines.append(f"%a: {images} = aten.add.Tensor({last}, %r)")
        last = "%a"
    if "relu" in beside:
        lines.append(f"%z: {images} = aten.relu.default({last})")
        last = "%z"
    returned = [last] if unread else [*(f"%s{i}" for i in range(4)), last]
    return SubgraphProblem(
        "\n".join([*lines, "return " + ", ".join(returned)]) + "\n", "ndhwc" if isinstance(h, tuple) else "nhwc"
    )


def backward(name, dtype="", masked=False):
    """The backward piece of a case, in NHWC; with `masked`, somebody reads the gradient after its mask."""
    n, c, h, w, own, beside = CASES[name]
    dtype = dtype or own
    images, row = f"{dtype}[{n},{c},{sides_of(h, w)}]", f"fp32[{c}]"
    whole = f"{dtype}[{n},{c + 24},{sides_of(h, w)}]" if "part" in beside else images
    lines = ["graph 1", f"input %g: {whole}"]
    if "add" in beside:
        lines.append(f"input %h: {images}")
    if "relu" in beside:
        lines.append(f"input %y: {images}")
    lines += [f"input %x: {images}", *(f"input %p{i}: {row}" for i in range(5))]
    last = "%g"
    if "add" in beside:
        lines.append(f"%a: {images} = aten.add.Tensor(%g, %h)")
        last = "%a"
    if "part" in beside:  # the channels from the sixteenth on: parts of 8 and 16 channels stand beside it
        lines.append(f"%a: {images} = aten.slice.Tensor(%g, 1, 16, {c + 16})")
        last = "%a"
    if "relu" in beside:
        lines.append(f"%m: {images} = aten.threshold_backward.default({last}, %y, 0)")
        last = "%m"
    lines.append(
        f"%dx: {images}, %dw: {row}, %db: {row} = aten.native_batch_norm_backward.default"
        f"({last}, %x, %p0, %p1, %p2, %p3, %p4, True, 1e-05, (True, True, True))"
    )
    returned = ["%dx", "%dw", "%db", *([last] if masked and last != "%g" else [])]
    return SubgraphProblem(
        "\n".join([*lines, "return " + ", ".join(returned)]) + "\n", "ndhwc" if isinstance(h, tuple) else "nhwc"
    )
