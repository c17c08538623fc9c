"""Tensor parallelism: one model on several ranks, each a process with a device, or some cores, of its own.

- `sharding.py`: how a model is divided among the ranks. Read it first.
- `rank_place.py`: one rank's place in its group.
- `communicator.py`: how the ranks combine their results.
- `symmetric_memory.py`: sums of few bytes between GPUs of one host.
- `shared_memory.py`: the same between CPU kernels on one host.
- `group_memory.py`: how the ranks of one host come to share memory.

`engine/rank_group.py` starts the ranks of one host, `engine/host_group.py` joins those of several hosts, and
`engine/rank.py` runs those after the first.
"""
