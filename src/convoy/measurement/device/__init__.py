"""The device that is measured on: what it is, what it can do at most, and how much of its memory may be used."""
