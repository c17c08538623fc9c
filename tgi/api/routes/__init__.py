"""The falcon resources, one module per group of routes. operations.py lists which path has which; read native.py first.

TGI's own: native (/generate, /generate_stream, /), tokenize, info (/health, /info, /metrics). OpenAI's: chat,
completions, models. Ours: adapters. Of clouds: sagemaker, vertex, kserve; they combine the former.
"""
