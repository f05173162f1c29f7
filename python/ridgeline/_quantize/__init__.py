"""Quantising: the linear layers of any module tree."""
