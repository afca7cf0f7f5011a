"""Order, lifetimes and memory of what was chosen. No torch here."""
