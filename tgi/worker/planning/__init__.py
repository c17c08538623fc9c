"""`tgi plan`: what fits on which devices, computed from config.json, without weights, a device or torch.

- deployment_plan: weights, KV cache and requests of each division into ranks and replicas; read this first
- devices: the devices that are planned with, and their memory
- report: a plan as text
"""
