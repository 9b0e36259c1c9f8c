"""Attention kernels in Triton. Importing a module here imports Triton, which CUDA builds of torch bring."""
