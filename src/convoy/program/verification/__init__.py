"""Verification of a plan against the graph that it is for: nothing in a plan's file is trusted."""
