"""Locates models and adapters: a directory, the Hub, a GGUF file, the default model. All become a model directory.

Read resolver.py first: from what the user names to a directory.

- hub_download, default_model, gguf_import (gguf/): the sources; gguf_import has the cache of imported models
- model_config, tokenizer_files, weight_files, adapter_files: reading and checking a directory, without torch
- vision_towers, vision: models whose images are served, and what stands for an image in their prompts
- image_file: the file of an image, which media processes write and workers read
- pooling: recognises models that end in a vector, and reads how they pool
- memory: whether a second model fits next to the one that is served
- overrides: a directory of links with some files replaced
- llguidance_tables: limits and token tables of grammars, shared by tokenizer and worker
"""
