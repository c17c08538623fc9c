"""Simulates many replicas under a load on virtual time. The tokenizers' choice and the schedulers are the product's.

`__main__` is the command (`scripts/simulate replicas`) and its report; read `fleet` first, then `workload`.
"""
