"""What processes tell each other. Read protocol first.

protocol         every message, the states of a request, finish reasons
kv_groups        which layers of a model keep which positions of a request
sampling_params  the table of generation parameters
codec            typed messages to msgpack frames and back; packed columns of numbers
"""
