"""Performance without a GPU: what the machine code does, what that costs, and what it may grow to.

`disassembly` and `loops` find each role's main loop in a cubin and `pipes` counts its instructions;
`model` turns the counts and the bytes moved into clocks of each resource; `budgets` keeps the
counts of every released kernel in the repository. Nothing here is a measurement.
"""
