"""Weights that other tools have quantised: how checkpoints store them."""
