"""Sizes that change: programs for some sizes, and calls of other sizes put together from them."""
