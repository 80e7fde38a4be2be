"""Serving: check arguments, load cubins and launch them through the CUDA driver."""
