"""Kernels for CUDA devices. Each file stands by itself: equations, kernels, launchers. Nothing here is imported without Triton."""
