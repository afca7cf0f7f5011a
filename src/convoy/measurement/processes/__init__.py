"""Processes that measure and compile: what crashes or hangs there costs a row and not the session."""
