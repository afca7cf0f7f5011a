"""The trainer: epochs of tuned steps over labelled images, with checkpoints; what `convoy train` runs."""
