"""Draws docs/figures/*.svg from bench/results/*.csv: whole nets provider by provider, and layers over their floor.

Run it to draw; with `--check` it exits 1 where a figure is not what the files say. The pictures are plain SVG, the same bytes
for the same figures, with their own background in light and dark. Run `bench/pages/write_tables.py` afterwards: it links them.

One device of a question is the one that README.md shows (the GPU with most cases) and has the short file name; the others'
files end in the device's name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.compare.options_figure import options_figure
from bench.inference.latency_figure import latency_figure
from bench.layers.layers_figure import layers_figure
from bench.scaling.scaling_figure import scaling_figure
from bench.shared.fair import before_replays
from bench.shared.record import Recorder
from bench.shared.rows import Row, preferred_first, rows_of
from bench.study.study_figure import study_figure

FIGURES = Path(__file__).parents[2] / "docs" / "figures"

Drawing = Callable[[Sequence[Row], str], str]

QUESTIONS: dict[str, tuple[str, str, Drawing]] = {
    "inference": ("inference", "Whole nets on a GPU", latency_figure),
    "cpu-inference": ("cpu-inference", "Whole nets on a CPU", latency_figure),
    "layers": ("layers-roofline", "Single layers", layers_figure),
    "compare": ("compare", "Frameworks side by side", latency_figure),
    "options": ("options", "PyTorch's options", options_figure),
    "study": ("study", "Convolution algorithms", study_figure),
    "scaling": ("scaling", "Training on several GPUs", scaling_figure),
}
"""Question → file name, title and how it is drawn."""


def render() -> dict[str, str]:
    """File name → figure, for every question and device that was measured."""
    figures: dict[str, str] = {}
    for question, (stem, title, draw) in QUESTIONS.items():
        for index, rows in enumerate(preferred_first(rows_of(question))):
            device = Recorder(question, device=rows[0]["device"]).path.stem.removeprefix(question)
            drawn = draw(before_replays(rows) or rows if draw is latency_figure else rows, title)
            if drawn:
                figures[f"{stem}{device if index else ''}.svg"] = drawn
    return figures


def main() -> int:
    """Draw or check the figures; one that nothing measured stands behind is taken away."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    wanted = render()
    there = {path.name: path.read_text(encoding="utf-8") for path in FIGURES.glob("*.svg")}
    stale = sorted(name for name in {*wanted, *there} if wanted.get(name) != there.get(name))
    for name in stale:
        print(
            f"{name}: {'is not what bench/results says' if options.check else 'drawn' if name in wanted else 'removed'}"
        )
        if options.check:
            continue
        if name in wanted:
            FIGURES.mkdir(parents=True, exist_ok=True)
            (FIGURES / name).write_text(wanted[name], encoding="utf-8")
        else:
            (FIGURES / name).unlink()
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
