"""CPU engines in C, which the host's compiler builds once: convolutions, poolings, concatenations, layout copies, scales."""
