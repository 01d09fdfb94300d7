"""Parts that the kernels of all ops share. Only kernels import this package, since it needs Triton."""
