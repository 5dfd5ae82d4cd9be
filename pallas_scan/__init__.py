"""pallas-scan: the selective scan (S6) of Mamba-1 for JAX, on GPUs and CPUs, with every gradient."""

from pallas_scan.api import scan
from pallas_scan.config import KernelConfig, ScanConfig
from pallas_scan.decoding import step

__version__ = "0.1.0"
__all__ = ["KernelConfig", "ScanConfig", "scan", "step"]
