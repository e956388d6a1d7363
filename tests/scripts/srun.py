"""Starts the tasks of a job as srun does, all nodes on this machine."""

import os
import subprocess
import sys

num_nodes, per_node = int(os.environ["SLURM_NNODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
tasks = []
for rank in range(num_nodes * per_node):
    env = {"NTASKS": num_nodes * per_node, "PROCID": rank, "NODEID": rank // per_node, "LOCALID": rank % per_node}
    told = {f"SLURM_{name}": str(value) for name, value in {**env, "STEP_ID": 0}.items()}
    tasks.append(subprocess.Popen(sys.argv[1:], env=os.environ | told))
sys.exit(max(task.wait() for task in tasks))
