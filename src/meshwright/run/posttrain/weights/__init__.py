"""Weights from ranks that train to ranks that serve, by the plan of `policy.transfer`.

    tensors         what a rank of either side has, with its place in the whole model
    packing         slices to bytes and back: casts, the seal with version and checksum
    arrivals        what has come of a version, kept aside until all of it is there
    in_process      both sides in one process
    shared_memory   processes of one machine, through files in memory
    messages        ranks of one process group, by gloo or NCCL
    offered         versions that lie in shared memory for engines elsewhere
    taking          engines whose ranks take what is offered; `rank` is one of them
    adapter_slot    an adapter in training where an engine answers with it
    serving         an engine that takes versions between its turns

A version is taken whole or not at all: until every parcel has come and was found sound, an engine
answers with the version it has.
"""
