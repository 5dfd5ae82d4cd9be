"""A selective scan for PyTorch in Triton, apart from JAX. Its kernels are not written yet."""
