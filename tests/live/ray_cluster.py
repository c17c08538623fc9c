"""A Ray cluster of several nodes on this host, in a process of its own: `python -m tests.live.ray_cluster`.

It prints the address, then obeys the lines of its standard input, each of which is answered by a line. `add CPUS`
starts a node and answers with the pid of its raylet, `kill PID` kills a raylet with SIGKILL, `left` tells how many
actors and placement groups there are. At the end of its input it ends the cluster.
"""

import os
import sys
from typing import Any

MEMORY = 80 << 20  # of the object store, which is not used
# A node that is gone is noticed within two seconds or so.
HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 2}


def main() -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray.cluster_utils import Cluster

    def options(cpus: int) -> dict[str, Any]:
        return {"num_cpus": cpus, "num_gpus": 0, "object_store_memory": MEMORY, "include_dashboard": False}

    cluster = Cluster(initialize_head=True, head_node_args={**options(0), "_system_config": HEALTH})
    raylets = {}
    try:
        print(cluster.address, flush=True)
        for line in sys.stdin:
            command, *arguments = line.split()
            answer = 0
            if command == "add":
                node = cluster.add_node(**options(int(arguments[0])))
                raylet = node.all_processes["raylet"][0].process
                raylets[raylet.pid] = raylet
                answer = raylet.pid
            elif command == "kill":
                raylet = raylets[int(arguments[0])]
                raylet.kill()
                raylet.wait()  # its workers end when they see that it has no process any more
            else:
                ray.init(cluster.address, log_to_driver=False)
                groups = ray.util.placement_group_table().values()
                answer = len(ray.util.list_named_actors(all_namespaces=True))
                answer += sum(group["state"] != "REMOVED" for group in groups)
                ray.shutdown()
            print(answer, flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
