"""The end-to-end check of a tuned program against float64, against PyTorch's own run, and by the clock."""
