"""Python attributes in which a model keeps values between calls."""
