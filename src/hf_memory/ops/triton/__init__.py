"""What kernels of all ops share. It is imported by kernels alone, as it needs Triton."""
