"""GGUF files: read with suspicion, turned into ordinary model directories by a child process that exits."""
