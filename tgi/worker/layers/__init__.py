"""Parts that models are made of."""
