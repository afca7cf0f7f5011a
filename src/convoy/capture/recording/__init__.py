"""A net's graph from one recorded run, which is faster than an export."""
