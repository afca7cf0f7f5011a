"""What all figures share: the page, its colours, and words in it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from bench.shared.rows import Row

WIDTH = 880
MARGIN = 16
HEADLINE = 102
"""Characters of a headline that fit between the margins."""

PEERS = {
    "torch.eager": "#8c959f",
    "torch.eager.nhwc": "#57606a",
    "torch.ddp": "#57606a",
    "torch.defaults": "#8c959f",
    "torch.best": "#57606a",
    "torch.alone": "#8c959f",
    "torch.step": "#2f9e8f",
    "torch.without": "#b04f9b",
    "torch.loader": "#7a5fc7",
    "torch.graph": "#8c959f",
    "torch.graph.nhwc": "#57606a",
    "inductor.default": "#2f9e8f",
    "inductor.reduce-overhead": "#2f9e8f",
    "inductor.conv_1x1_as_mm": "#2f9e8f",
    "inductor.coordinate-descent": "#1b7f5c",
    "inductor.max-autotune": "#1b7f5c",
    "onnxruntime": "#7a5fc7",
    "openvino": "#b04f9b",
    "tensorflow": "#c58a00",
    "jax": "#3b7dd8",
    "cudnn.best": "#8c959f",
    "cusparse": "#3b7dd8",
    "mkl.sparse": "#3b7dd8",
    "cublas": "#7a5fc7",
}
"""Every peer by its one name, and its colour; each is told from its neighbours in light, in dark and in grey."""

OURS = "#e8590c"
"""Convoy's colour."""

STYLE = (
    "text{font-family:-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;font-size:12px;fill:#1f2328}"
    ".title{font-size:15px;font-weight:600}.small{font-size:11px;fill:#57606a}.strong{font-weight:600}"
    ".page{fill:#ffffff}.grid{stroke:#d0d7de;stroke-width:1}.spread{stroke:#1f2328;stroke-width:1}"
    ".link{stroke:#8c959f;stroke-width:0.7;opacity:0.6}"
    "@media (prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9da7b3}.page{fill:#0d1117}"
    ".grid{stroke:#30363d}.spread{stroke:#e6edf3}}"
)


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    style = f' class="{kind}"' if kind else ""
    where = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{style}{where}>{escape(words)}</text>'


def page(height: float, title: str, parts: Sequence[str]) -> str:
    """A whole file; the title is also what figures are described by to those who cannot see them."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" role="img"><title>{escape(title)}</title><style>{STYLE}</style>'
        f'<rect class="page" width="{WIDTH}" height="{height:.0f}" rx="6"/>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def source(rows: Sequence[Row], most: int | None = None) -> str:
    """Device and commits of some rows; of more than `most`, the last ones and how many others there are."""
    commits = list(dict.fromkeys(row["commit"] for row in rows))
    if most is not None and len(commits) > most:
        return f"{rows[0]['device']}, commit {', '.join(commits[-most:])} and {len(commits) - most} others"
    return f"{rows[0]['device']}, commit {', '.join(commits)}"


def headline(title: str, rows: Sequence[Row]) -> str:
    """The line at the top, with as many commits as fit, at most four; a page's own title names all."""
    lines = [f"{title}, {source(rows, most)}" for most in (4, 3, 2, 1)]
    fitting = next((line for line in lines if len(line) <= HEADLINE), lines[-1])
    return text(MARGIN, 28, fitting, "title")


def colour(provider: str) -> str:
    """A provider's colour.

    Raises:
        ValueError: a provider without a name in `PEERS`.
    """
    if provider == "convoy" or provider.startswith("convoy."):
        return OURS
    if provider not in PEERS:
        raise ValueError(f"provider {provider!r}: expected convoy, convoy.ENGINE_ID or one of {', '.join(PEERS)}")
    return PEERS[provider]


def short(value: float) -> str:
    """Three digits of a number."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
