"""The worker: tensors. The only room that imports torch."""
