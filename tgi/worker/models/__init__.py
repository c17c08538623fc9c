"""Models: what computes logits from a batch of tokens."""
