"""The selective scan (S6) for PyTorch in Triton, apart from JAX: the same function as `pallas_scan.scan`, and
mamba_ssm's functions without its CUDA build."""

from triton_ref.api import selective_scan
from triton_ref.in_transformers import use_in_transformers
from triton_ref.mamba_ssm_api import selective_scan_fn, selective_state_update

__all__ = ["selective_scan", "selective_scan_fn", "selective_state_update", "use_in_transformers"]
