"""Plain-torch implementations. Nothing here imports triton or the kernels."""
