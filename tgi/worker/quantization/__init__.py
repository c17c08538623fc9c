"""Weights in few bits: what they are, how they are made, and how checkpoints bring them."""
