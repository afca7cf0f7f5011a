"""Engines for what stands between convolutions on a CPU: C that the host's compiler builds once."""
