"""Building kernels: compile a configuration, read and check the cubin, publish it in a store."""
