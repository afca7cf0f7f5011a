"""Processes that measure and compile: a crash or a hang there costs one row, not the session."""
