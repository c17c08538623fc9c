"""The tokenizer pool: text to ids and back. No torch, no transformers."""
