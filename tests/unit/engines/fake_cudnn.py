"""A stand-in for the frontend of cuDNN: graphs that check what they are given and compute on the CPU, plans out of a table."""

import ctypes
from dataclasses import dataclass
from enum import Enum, IntEnum
from types import SimpleNamespace

import torch
import torch.nn.functional as F

Type = Enum("Type", ["FLOAT", "HALF", "BFLOAT16"])
Mode = Enum("Mode", ["A", "B", "FALLBACK"])
Note = Enum(
    "Note", ["NOT_SET", "TENSOR_CORE", "DOWN_CONVERT_INPUTS", "FFT", "NONDETERMINISTIC", "WINOGRAD", "WINOGRAD_TILE_4x4"]
)  # fmt: skip
Behaviour = Enum("Behaviour", ["RUNTIME_COMPILATION"])
Kind = IntEnum("Kind", ["NOT_SET", "SWIZZLE", "TILE_SIZE", "EDGE", "MULTIPLY"], start=0)
DTYPES = {Type.FLOAT: torch.float32, Type.HALF: torch.float16, Type.BFLOAT16: torch.bfloat16}


class NotSupportedError(Exception):
    """Like the frontend's own error: no RuntimeError."""


@dataclass
class Entry:
    """A plan: its tag's knobs in cuDNN's numbers, those that the frontend has a word for, and what is true of it."""

    engine: int
    tag: str = ""
    knobs: dict = None
    notes: tuple = ()
    workspace: int = 0
    modes: tuple = (Mode.A,)
    refuses: str = ""
    behaviours: tuple = ()


class Tensor:
    """A node with its result: the operation's sizes, and the attributes (uid, dim, stride, ...) of the tensor."""

    def __init__(self, operation, inputs, sizes, attributes):
        self.operation, self.inputs, self.sizes, self.attributes = operation, inputs, sizes, attributes

    def _set(self, name, value):
        self.attributes[name] = value
        return self

    def set_output(self, value):
        return self._set("output", value)

    def set_data_type(self, value):
        return self._set("data_type", value)

    def set_dim(self, value):
        return self._set("dim", value)

    def set_stride(self, value):
        return self._set("stride", value)

    def set_uid(self, value):
        return self._set("uid", value)


class Graph:
    """One graph of the fake; `frontend` is the module that it belongs to."""

    frontend = None

    def __init__(self, **settings):
        assert settings["intermediate_data_type"] is settings["compute_data_type"] is Type.FLOAT
        assert settings["handle"] in self.frontend.handles
        self.tensors, self.last, self.plans, self.barred, self.built = {}, None, [], set(), set()
        self.limit, self.ready = None, False

    def tensor(self, **attributes):
        made = Tensor("input", (), {}, attributes)
        assert attributes["uid"] not in self.tensors
        self.tensors[attributes["uid"]] = made
        return made

    def __getattr__(self, operation):
        if operation not in {
            "conv_fprop",
            "conv_dgrad",
            "conv_wgrad",
            "add",
            "bias",
            "relu",
            "swish",
            "sigmoid",
            "gelu",
        }:
            raise AttributeError(operation)

        def node(*inputs, **sizes):
            self.last = Tensor(operation, inputs, sizes, {})
            return self.last

        return node

    def validate(self):
        assert self.last.attributes["output"] is True
        self.tensors[self.last.attributes["uid"]] = self.last

    def build_operation_graph(self):
        fused = not self.last.operation.startswith("conv_")
        if fused and self.frontend.refuses_fusion:
            raise NotSupportedError("no engine fuses this\nsecond line")
        self.ready = True

    def create_execution_plans(self, modes):
        assert self.ready
        self.frontend.queries += 1
        self.plans = [e for mode in modes for e in self.frontend.table if mode in e.modes]
        if not self.plans:
            raise NotSupportedError("No valid engine configs for ConvFwd_\n")

    def create_execution_plan(self, engine, knobs):
        assert self.ready
        found = [
            e for e in self.frontend.table if e.engine == engine and e.knobs == knobs and Kind.NOT_SET not in knobs
        ]
        if not found:
            raise RuntimeError("Invalid engine id.")
        self.plans.append(found[0])

    def get_execution_plan_count(self):
        return len(self.plans)

    def get_engine_and_knobs_at_index(self, index):
        return self.plans[index].engine, dict(self.plans[index].knobs or {})

    def get_plan_name_at_index(self, index):
        return self.plans[index].tag

    def deselect_numeric_notes(self, notes):
        assert self.plans, "a filter set before there are plans is lost"
        self.barred |= {i for i, entry in enumerate(self.plans) if set(notes) & set(entry.notes)}

    def deselect_workspace_greater_than(self, limit):
        self.limit = limit

    def get_behavior_notes_for_plan_at_index(self, index):
        return list(self.plans[index].behaviours)

    def build_plan_at_index(self, index):
        entry = self.plans[index]
        if index in self.barred:
            raise RuntimeError("Deselecting execution plan")
        if self.limit is not None and entry.workspace > self.limit:
            self.barred.add(index)
            raise RuntimeError(f"Error: Skipping plan since workspace violation. Requires {entry.workspace}")
        if entry.refuses:
            raise RuntimeError(entry.refuses)
        self.frontend.builds += 1
        self.built.add(index)

    def get_workspace_size_plan_at_index(self, index):
        return self.plans[index].workspace + self.frontend.grows

    def execute_plan_at_index(self, pointers, workspace, index, handle):
        assert index in self.built
        assert handle in self.frontend.handles
        assert set(pointers) == set(self.tensors)
        assert (workspace is None) == (self.plans[index].workspace == 0)
        if self.frontend.fails:
            raise RuntimeError(self.frontend.fails)
        found = {uid: _at(pointers[uid], t.attributes) for uid, t in self.tensors.items()}
        target = self.last.attributes["uid"]
        found[target].copy_(
            _value(self.last, found, {id(t): uid for uid, t in self.tensors.items()}, found[target].shape)
        )


def _at(address, attributes):
    """The tensor that lies at an address."""
    dtype = DTYPES[attributes["data_type"]]
    dim, stride = attributes["dim"], attributes["stride"]
    size = sum((d - 1) * s for d, s in zip(dim, stride, strict=True)) + 1
    raw = (ctypes.c_char * (size * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype).as_strided(dim, stride)


def _value(tensor, found, uids, shape):
    if tensor.operation == "input":
        return found[uids[id(tensor)]].float()
    first, *rest = (_value(t, found, uids, shape) for t in tensor.inputs)
    sizes = tensor.sizes
    if tensor.operation.startswith("conv"):
        plain = (sizes["stride"], sizes["padding"], sizes["dilation"])
        groups = {
            "conv_fprop": lambda: first.shape[1] // rest[0].shape[1],
            "conv_dgrad": lambda: shape[1] // rest[0].shape[1],
            "conv_wgrad": lambda: first.shape[1] // shape[1],
        }[tensor.operation]()
    if tensor.operation == "conv_fprop":
        return (F.conv2d if first.dim() == 4 else F.conv3d)(first, rest[0], None, *plain, groups)
    if tensor.operation == "conv_dgrad":
        of_input = torch.nn.grad.conv2d_input if first.dim() == 4 else torch.nn.grad.conv3d_input
        return of_input(shape, rest[0], first, *plain, groups)
    if tensor.operation == "conv_wgrad":
        of_weight = torch.nn.grad.conv2d_weight if first.dim() == 4 else torch.nn.grad.conv3d_weight
        return of_weight(first, shape, rest[0], *plain, groups)
    if tensor.operation in ("add", "bias"):
        return first + rest[0]
    if tensor.operation == "relu":
        return first.clamp(sizes.get("lower_clip", 0.0), sizes.get("upper_clip"))
    return {"swish": F.silu, "sigmoid": torch.sigmoid, "gelu": F.gelu}[tensor.operation](first)


def plan(engine, notes=(), workspace=0, knobs=None, **rest):
    """An entry whose knobs the frontend has words for."""
    knobs = {Kind(number): value for number, value in (knobs or {}).items()}
    tag = f"eng{engine}" + "".join(f"_k{10 + kind}={value}" for kind, value in knobs.items())
    return Entry(engine, tag, knobs, tuple(getattr(Note, name) for name in notes), workspace, **rest)


def nameless(engine, *numbers, **rest):
    """An entry with a knob that the frontend has no word for."""
    tag = f"eng{engine}" + "".join(f"_k{number}=-{number}" for number in numbers)
    return Entry(engine, tag, {Kind.NOT_SET: -1}, **rest)


def frontend(*table):
    """The module."""
    made = SimpleNamespace(
        __version__="1.99",
        table=list(table),
        refuses_fusion=False,
        fails="",
        grows=0,
        queries=0,
        builds=0,
        handles=[],
        streams=[],
        data_type=Type,
        heur_mode=Mode,
        numerical_note=Note,
        knob_type=Kind,
        cudnnGraphNotSupportedError=NotSupportedError,
        backend_version=lambda: 91900,
        set_stream=lambda handle, stream: made.streams.append((handle, stream)),
    )

    def create_handle():
        made.handles.append(f"handle {len(made.handles)}")
        return made.handles[-1]

    made.create_handle = create_handle
    made.pygraph = type("pygraph", (Graph,), {"frontend": made})
    return made
