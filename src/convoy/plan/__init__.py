"""Selection and schedule of one net as data: read, write, compare, explain. No torch here."""
