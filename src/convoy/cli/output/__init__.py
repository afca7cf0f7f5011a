"""Everything that commands print or write: lines, progress, the files that they made, and what Ctrl-C left of them."""
