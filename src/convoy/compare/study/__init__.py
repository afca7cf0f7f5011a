"""Convolution algorithms over swept structure, and the criteria that are learned from the measurements."""
