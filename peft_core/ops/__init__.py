"""Differentiable functions of Tensors."""
