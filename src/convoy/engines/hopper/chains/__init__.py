"""Several convolutions as one kernel: values between them stay in shared memory."""
