"""How a job's processes come to be: on this machine, under Slurm, Kubernetes or Ray.

start         what is started: the command, how many ranks on how many nodes, variables
local         processes of this machine, for `mw train --nproc`
last_words    what one of them says of its end, to whoever started it
ending        whose fault the end of all was
places        what each launcher tells a process about its place
environment   that place, whoever told it, and how processes meet
reach         the way to the store where they meet
agreement     how they compare their jobs before a group forms
slurm, kubernetes, ray   pure writers of job files; they start nothing

Writers load no torch, so that a login node without it can write a job.
"""
