"""GGUF files: checked, and converted to model directories by a child process that exits.

Read convert.py first: the child process.

- reader: the header of a file, with every count and offset checked
- families: the architectures that import knows, as data; add one here
- conversion_plan: what a file becomes: checked metadata, tensors and where they come from
- architecture, t5, encoders: metadata and tensor names in Hugging Face's terms; of decoders, of encoder-decoder models,
  and of encoders
- pooling: how models end in a vector, as files of sentence-transformers
- tokenizer: the tokenizer from the metadata
- projector: the same of a vision part, which has a file of its own
- weights, block_types: tensors in bfloat16, or in their own bits without any rounding
"""
