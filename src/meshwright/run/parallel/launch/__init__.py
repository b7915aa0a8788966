"""How a job's processes come to be: on this machine, under Slurm, Kubernetes or Ray.

start         what is started: the command, how many ranks on how many nodes, variables
local         processes of this machine, for `mw train --nproc`
environment   what any launcher tells a process about its place, and how processes meet
slurm, kubernetes, ray   pure writers of job files; they start nothing

Writers load no torch, so that a login node without it can write a job.
"""
