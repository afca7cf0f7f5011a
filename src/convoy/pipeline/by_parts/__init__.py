"""Models that cannot be captured whole: their largest modules that can be get a program each."""
