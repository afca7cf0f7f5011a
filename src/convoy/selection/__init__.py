"""The choice: cover the graph with candidates at least total time. No torch here."""
