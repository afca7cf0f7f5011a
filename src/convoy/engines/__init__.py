"""How a problem can be computed: every implementation behind one contract (see base.py)."""
