"""The scheduler: continuous batching over pages. Ids only, no strings, no torch."""
