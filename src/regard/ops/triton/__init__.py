"""Kernels for CUDA devices. Each file stands by itself: equations, kernels, launchers. Only `sine_fits` can be imported without Triton."""
