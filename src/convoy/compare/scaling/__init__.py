"""How data-parallel training scales over the GPUs of one host."""
