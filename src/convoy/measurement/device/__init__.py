"""The measured device: its properties, its peak rates, and how much of its memory may be used."""
