"""What are PyTorch's options worth? Question `options`, metric `latency_ms`: defaults and the best setting.

`convoy compare --options` on some nets, as CSV; every step of the ablation stands in the run files. Run it on a quiet machine:

    python bench/options.py [--nets alexnet,googlenet,resnet50] [--batch 1,32] [--train] [--options all] [--folder runs]
"""

from __future__ import annotations

from compare import arguments, cases, record, tell

from convoy.compare.ablation import search_options
from convoy.compare.comparison import Limits
from convoy.compare.page import sheet_of
from convoy.report.sheet import print_sheet, write_sheet

PROVIDERS = {"defaults": "torch.defaults", "best": "torch.best"}


def main() -> None:
    """Run the search, print it, write the CSV, the run files and the pages."""
    options = arguments(__doc__, "alexnet,googlenet,resnet50")
    options.folder.mkdir(parents=True, exist_ok=True)
    for net in options.nets.split(","):
        every = cases(options, net)
        path = options.folder / f"options-{net}-{every[0].mode}-{every[0].device}.json"
        request = {"command": "options", **every[0].to_dict(), "batch": options.batch}
        run = search_options(
            every, options.options, path, request=request, limits=Limits(), again=options.again, observer=tell
        )
        sheet = sheet_of([run])
        print_sheet(sheet)
        write_sheet(sheet, path.with_suffix(".html"))
        rows = [row for row in run.rows if row.provider in PROVIDERS]
        recorder = record(run, rows, "options")
        for line in recorder.rows:
            line["provider"] = PROVIDERS[line["provider"]]
        print(recorder.write())


if __name__ == "__main__":
    main()
