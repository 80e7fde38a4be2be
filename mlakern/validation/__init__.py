"""Run a kernel on poisoned inputs, on a GPU or the emulator, and compare with both references."""
