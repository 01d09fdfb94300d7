"""Pure functions of tensors; the registry OPS is what the contract tests run over."""
