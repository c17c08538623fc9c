"""LoRA adapters (Hu et al., 2021): y = W x + s B (A x), with small A and B for some matrices of the model."""
