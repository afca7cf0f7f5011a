"""Run files: their rows, their manifest, their pages, and the difference of two."""
