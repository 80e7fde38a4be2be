"""Device code: the attention and combine kernels in CuTe DSL.

Modules here (and in mlakern.build) are the only ones that import cutlass. `layout` modules hold
the compile-time facts of a kernel without it, so that the host side and the tests can read them.
"""
