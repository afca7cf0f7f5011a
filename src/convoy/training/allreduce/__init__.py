"""How gradients are averaged over processes: all-reduces by buckets, in fp32 or bf16, and gathered factors of linear layers."""
