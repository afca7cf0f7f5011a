"""Case: one net in one setting, as every framework is given it. Plain data that crosses to a child process as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from convoy.narrowing import is_list

MODES: Final = ("inference", "training")
DTYPES: Final = ("fp32", "fp16", "bf16")

LEARNING_RATE: Final = 1e-4
MOMENTUM: Final = 0.9
"""Of the SGD step that training times: every framework updates parameters by the same rule. With random weights a larger step
throws the net so far that rounding decides where it lands: at 0.01 the losses of ResNet-50 after it differ by 6 %."""


@dataclass(frozen=True, slots=True)
class Case:
    """One net in one setting.

    Attributes:
        model: as `convoy.zoo.load_model` takes it.
        weights: a .safetensors file, `DEFAULT`, or empty for the seeded random ones.
        batch: images of one call.
        size: of the images, pixels; one number for square images, or (height, width); 0: the model's own.
        dtype: `fp32`, `fp16` or `bf16`; in training, the type of autocast (parameters stay fp32).
        mode: `inference` or `training` (forward, backward and an SGD step).
        device: `cpu` or `cuda`.
        threads: threads of a CPU that each framework may use.
        effort: how much Convoy may tune (`none`, `quick`, `full`).
        time_s: seconds after which Convoy stops measuring and predicts the rest; 0: no limit.
        db: Convoy's performance database; empty: the user's.
        trust: the model's file may run code.
    """

    model: str
    weights: str = ""
    batch: int = 1
    size: int | tuple[int, int] = 0
    dtype: str = "fp32"
    mode: str = "inference"
    device: str = "cpu"
    threads: int = 1
    effort: str = "quick"
    time_s: float = 0.0
    db: str = ""
    trust: bool = False

    @property
    def training(self) -> bool:
        """Whether whole steps are run."""
        return self.mode == "training"

    @property
    def axes(self) -> dict[str, int | float | str]:
        """Axes of this case's rows: the size of the images, where it is not the model's own."""
        if not self.size:
            return {}
        return {"size": "x".join(map(str, self.size)) if isinstance(self.size, tuple) else self.size}

    def label(self) -> str:
        """The case in words: `resnet50 batch 1 inference`."""
        return f"{self.model} batch {self.batch} {self.mode}"

    def to_dict(self) -> dict[str, Any]:
        """JSON's types."""
        return {**asdict(self), "size": list(self.size) if isinstance(self.size, tuple) else self.size}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Case:
        """Inverse of `to_dict`."""
        size: Any = data.get("size", 0)
        arguments: dict[str, Any] = {**data, "size": tuple(size) if is_list(size) else size}
        return Case(**arguments)
