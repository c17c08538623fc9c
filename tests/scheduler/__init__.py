"""The scheduler without processes: its core, a scripted worker, and tokenizers that check what they are told."""
