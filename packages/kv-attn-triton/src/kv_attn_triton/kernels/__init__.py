"""Triton kernels. Importing a module here imports triton."""
