"""The memory: measurements in SQLite, shipped results beside the user's. The only package that writes SQL."""
