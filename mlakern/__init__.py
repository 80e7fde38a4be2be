"""mlakern: ahead-of-time compiled FP8 MLA decode kernels with a cubin cache."""
