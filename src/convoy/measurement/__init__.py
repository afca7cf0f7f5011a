"""The clock: device and stack, protocol, accuracy, runners and the staged search."""
