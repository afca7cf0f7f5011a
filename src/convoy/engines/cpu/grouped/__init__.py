"""Convolutions in few groups of several channels, on a CPU."""
