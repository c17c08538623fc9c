"""Where models come from: a directory, the Hub, a GGUF file, the default model. All end in a model directory."""
