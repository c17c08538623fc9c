"""Places the ranks of a worker on the devices of a Ray cluster (`tgi up --ray`). The only package that imports ray.

- `driver.py`: the process that stands for such a worker on the scheduler's host. Read it first.
- `rank_actor.py`: the Ray actor that runs one rank on its node.
"""
