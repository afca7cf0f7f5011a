"""What one kernel could do: proposals of regions, one pattern a file. No torch here."""
