"""How a job's processes come to be: on this machine, under Slurm, Kubernetes or Ray.

launch_spec        what is started: the command, how many ranks on how many nodes, variables
local              processes of this machine, for `mw train --nproc-per-node`
rank_spawner       starts one such process
exit_reason        the reason that a rank reports for its end, to the process that started it
exit_summary       the rank that ended the job, and why
launcher_env       rank and size, read from the variables of each launcher
world              the rank's place, from any launcher, and how processes rendezvous
store_server       the store where they rendezvous, at chosen addresses only
store_client       the connection to that store
config_consensus   compares the jobs of all ranks before a group forms
slurm, kubernetes, ray   writers of job files; they start nothing

Writers load no torch, so that a login node without it can write a job.
"""
